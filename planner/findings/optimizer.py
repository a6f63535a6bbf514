"""Tries a model's optimizer on small stand-ins, to find which parameters a rank must hold whole.

A rank's optimizer gets only what the rank holds: with ZeRO or tensor ranks parts of parameters, in
a pipeline the parameters of some layers. This silently changes the training if the update of an
element depends on other elements (Muon's on a matrix, another's on a parameter's norm), or if
parameter groups depend on positions in the list of parameters.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.planner.errors import AutoparError, InputError
from autopar.planner.findings import OptimizerTraits, ParameterPart, Reach
from autopar.planner.findings.optimizer_call import (
    LARGEST_DIFFERENCE,
    NAME,
    STEPS,
    Make,
    StandIn,
    check_optimizer,
    check_step,
    make_on_stand_ins,
    own_tensors,
    parameters_for,
    schedule_end,
    stand_ins_of,
    stepped_gradients,
    unlike_parts,
)
from autopar.planner.findings.writes import check_stepped_state
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.without_memory import without_memory

Schedule: TypeAlias = Callable[[Any], Any]

_FP32_BYTES = 4
_LISTS = ("params", "param_names")  # keys of a parameter group that are no settings
_WRONG_VALUES = (ValueError, LookupError, ArithmeticError, AssertionError)


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore the random generators of torch (on the CPU), Python and numpy after the body."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@_generators_restored()
def optimizer_traits(model_file: ModelFile, graph: Graph) -> OptimizerTraits | None:
    """Return the properties of the model's optimizer, or of AdamW if the model file builds none.

    None if the optimizer cannot be tried here. Raises for an optimizer or scheduler that a script
    cannot create or call.
    """
    is_own = model_file.build_optimizer is not None or model_file.build_scheduler is not None
    built = without_memory(model_file) if is_own else None
    make = make_on_stand_ins(model_file, graph, built)
    every = stand_ins_of(graph, built)
    by_size = {one.size: one for one in every}
    # AdamW treats parameters of one size alike, so one stand-in of each size is enough.
    stand_ins = list(by_size.values()) if model_file.build_optimizer is None else every
    try:
        optimizer = make(parameters_for(stand_ins))
    except AutoparError as error:
        if _is_mistake(error.__cause__) or _fails_in_full(model_file, error.__cause__):
            raise
        return None  # build_optimizer may need sizes or a device that stand-ins do not have
    try:
        scheduler = model_file.build_scheduler and model_file.build_scheduler(optimizer)
    except AutoparError as error:
        if _is_mistake(error.__cause__) or isinstance(error.__cause__, _WRONG_VALUES):
            raise
        return None
    where = str(model_file.path)
    check_step(
        optimizer,
        "build_optimizer",
        "AdamW, SGD or another that is stepped without the loss",
        where,
    )
    check_optimizer(optimizer, where)
    ends = None
    if model_file.build_scheduler is not None:
        check_step(
            scheduler,
            "build_scheduler",
            "a scheduler whose step() needs no argument, such as LambdaLR",
            where,
        )
        ends = schedule_end(model_file, model_file.build_scheduler(optimizer))
    check_stepped_state(model_file.path, built, partial(_step_once, optimizer, scheduler))
    try:
        kept, draws = _moments_and_draws(make, stand_ins)
        if len(stand_ins) < len(every):
            of_size = dict(zip(by_size, kept, strict=True))
            kept = tuple(of_size[one.size] for one in every)
        reach, kept_tensors = _reach(make, stand_ins), own_tensors(optimizer)
        kinds = tuple(ParameterPart) if reach is Reach.NUMBER and not draws else ()
        kinds = kinds[:1] if kept_tensors else kinds  # ZeRO cannot divide such tensors
        return OptimizerTraits(
            name=type(optimizer).__name__,
            reach=reach,
            unlike_parts=unlike_parts(make, stand_ins, kinds),
            groups_by_size=_groups_by_size(make, graph),
            groups_by_position=_groups_by_position(make, model_file.build_scheduler, stand_ins),
            moments=kept,
            draws=draws,
            own_tensors=kept_tensors,
            ends=ends,
        )
    except Exception:  # a step may only work on other devices
        _refuse_sparse(make, every, type(optimizer).__name__, where)
        return None


def _refuse_sparse(make: Make, every: Sequence[StandIn], name: str, where: str) -> None:
    """Raise for an optimizer that accepts only sparse gradients."""
    parameters = [one for one in parameters_for(every) if one.ndim == 2]
    if _can_step(make, parameters, is_sparse=False) or not _can_step(
        make, parameters, is_sparse=True
    ):
        return
    raise InputError(
        f"{name} takes sparse gradients alone",
        where=where,
        expected="an optimizer for dense gradients: ranks sum all gradients as dense tensors, "
        "also those of nn.Embedding(sparse=True)",
        fix="AdamW, Adagrad or SGD",
    )


def _can_step(make: Make, parameters: Sequence[nn.Parameter], *, is_sparse: bool) -> bool:
    """Whether an optimizer takes a step with dense or sparse gradients."""
    try:
        optimizer = make(parameters)
        for one in parameters:
            one.grad = torch.ones_like(one).to_sparse(1) if is_sparse else torch.ones_like(one)
        optimizer.step()
    except Exception:
        return False
    return True


def _is_mistake(cause: BaseException | None) -> bool:
    """Whether code would fail with any parameters, not just because stand-ins lack attributes.

    An error without a cause is autopar's own (the code called sys.exit, say): also a mistake.
    """
    if isinstance(cause, AttributeError):
        return not isinstance(cause.obj, nn.Parameter)
    return cause is None or isinstance(cause, (NameError, TypeError, RecursionError))


def _fails_in_full(model_file: ModelFile, cause: BaseException | None) -> bool:
    """Whether build_optimizer refuses a value with the model's own parameters, too.

    The model's parameters are on meta. If an optimizer reads their values there, torch raises an
    error of another type, for which the result is False.
    """
    if not isinstance(cause, _WRONG_VALUES) or model_file.build_optimizer is None:
        return False
    model = without_memory(model_file)
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    asked = next(iter(inspect.signature(model_file.build_optimizer).parameters), "")
    given = {"model": model, "named_parameters": named}
    try:
        model_file.build_optimizer(given.get(asked, [one for _, one in named]))
    except AutoparError as error:
        return isinstance(error.__cause__, _WRONG_VALUES)
    return False


def _step_once(optimizer: Any, scheduler: Any) -> None:
    """Take one step with zero gradients, if the optimizer can step here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with suppress(Exception):
        optimizer.step()
    if scheduler is not None:
        scheduler.step()


def _reach(make: Make, stand_ins: Sequence[StandIn]) -> Reach:
    """Return an optimizer's reach: change some elements, and see whether others' updates change."""
    # masks of elements to change: all those of every second parameter
    whole_ones = [torch.full((_count(one),), bool(n % 2)) for n, one in enumerate(stand_ins)]
    plain = _updates(make, stand_ins, [torch.zeros_like(one) for one in whole_ones])
    if not _same_where_unchanged(make, stand_ins, plain, whole_ones):
        return Reach.MODEL
    second_halves = [torch.arange(_count(one)) >= (_count(one) + 1) // 2 for one in stand_ins]
    # every second element along each dim, as on a chessboard
    chessboards = [torch.ones(one.size).nonzero().sum(1) % 2 == 1 for one in stand_ins]
    masks = (second_halves, chessboards)
    is_alone = all(_same_where_unchanged(make, stand_ins, plain, changed) for changed in masks)
    return Reach.NUMBER if is_alone else Reach.PARAMETER


def _same_where_unchanged(
    make: Make, stand_ins: Sequence[StandIn], plain: Sequence[Tensor], changed: Sequence[Tensor]
) -> bool:
    """Whether elements outside the masks get the updates `plain` if those inside change."""
    other = _updates(make, stand_ins, changed)
    if not all(bool(one.isfinite().all()) for one in (*plain, *other)):
        raise ArithmeticError("updates of stand-ins tell nothing")
    largest = max((float(one.abs().max()) for one in plain), default=0.0)
    return all(
        float((own - new).abs().mul(~is_changed).max()) <= LARGEST_DIFFERENCE * largest
        for own, new, is_changed in zip(plain, other, changed, strict=True)
    )


def _updates(make: Make, stand_ins: Sequence[StandIn], changed: Sequence[Tensor]) -> list[Tensor]:
    """Return each element's change over some steps.

    Elements in `changed` begin 10 times larger, and get gradients that are 10 times larger.
    """
    parameters = parameters_for(stand_ins)
    factors = [
        1 + 9 * is_changed.view(one.size)
        for is_changed, one in zip(changed, stand_ins, strict=True)
    ]
    with torch.no_grad():
        for parameter, factor in zip(parameters, factors, strict=True):
            parameter.mul_(factor)
    before = [one.detach().clone() for one in parameters]
    _stepped(make, parameters, factors)
    return [(one.detach() - was).flatten() for one, was in zip(parameters, before, strict=True)]


def _stepped(
    make: Make, parameters: Sequence[nn.Parameter], factors: Sequence[Tensor]
) -> tuple[Any, bool]:
    """Return an optimizer after some steps, and whether these draw random numbers.

    `factors` multiply the gradients.
    """
    optimizer = make(parameters)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    before, drawn = _other_states(optimizer), _SeesDraws()
    for gradients in stepped_gradients(optimizer, parameters):
        for parameter, gradient, factor in zip(parameters, gradients, factors, strict=True):
            parameter.grad = gradient * factor
        with drawn:
            optimizer.step()
    return optimizer, drawn.any or before != _other_states(optimizer)


class _SeesDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notices random draws of torch, from any generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        del types
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _other_states(optimizer: Any) -> bytes:
    """Return the states of Python's, numpy's and the optimizer's own random generators."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    owned = [one for one in vars(optimizer).values() if isinstance(one, kinds)]
    return pickle.dumps((random.getstate(), np.random.get_state(), owned))


def _moments_and_draws(make: Make, stand_ins: Sequence[StandIn]) -> tuple[tuple[float, ...], bool]:
    """Return how many fp32 numbers per element the optimizer keeps for each parameter.

    Also return whether its steps draw random numbers.
    """
    parameters = parameters_for(stand_ins)
    optimizer, draws = _stepped(make, parameters, [torch.ones(())] * len(parameters))
    moments = tuple(
        sum(
            kept.element_size() / _FP32_BYTES
            for kept in optimizer.state.get(parameter, {}).values()
            if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.dim()
        )
        for parameter in parameters
    )
    return moments, draws


def _count(one: StandIn) -> int:
    return torch.Size(one.size).numel()


def _groups_by_position(
    make: Make, schedule: Schedule | None, stand_ins: Sequence[StandIn]
) -> bool:
    """Whether parameters get other settings, or an error, if only half of them are given."""
    parameters = parameters_for(stand_ins)
    middle = len(parameters) // 2
    if not middle:
        return False
    try:
        halves = [
            _settings(make, schedule, half) for half in (parameters[:middle], parameters[middle:])
        ]
    except AutoparError:
        return True
    return halves[0] | halves[1] != _settings(make, schedule, parameters)


def _groups_by_size(make: Make, graph: Graph) -> bool:
    """Whether parameters get other settings, or an error, if tensor ranks share a dim of each.

    These parameters have the model's own sizes, and no memory. False if an optimizer cannot be
    made with such parameters.
    """
    try:
        whole = _settings_of_sizes(make, graph, dim=0, ranks=1)
    except AutoparError:
        return False
    try:
        return any(
            _settings_of_sizes(make, graph, dim=dim, ranks=ranks) != whole
            for dim in (0, 1)
            for ranks in (2, 8)
        )
    except AutoparError:
        return True


def _settings_of_sizes(make: Make, graph: Graph, *, dim: int, ranks: int) -> dict[str, str]:
    """Return the settings of each trainable parameter by name, if ranks share one of its dims."""
    parameters = []
    for one in (one for one in graph.parameters if one.trainable):
        size = [at.at(1) for at in one.shape]
        if dim < len(size):
            size[dim] = max(1, size[dim] // ranks)
        parameters.append(nn.Parameter(torch.empty(size, device="meta")))
        setattr(parameters[-1], NAME, one.name)
    found = _settings(make, None, parameters)
    return {getattr(one, NAME): found.get(id(one), "") for one in parameters}


def _settings(
    make: Make, schedule: Schedule | None, parameters: Sequence[nn.Parameter]
) -> dict[int, str]:
    """Return, for the id of each parameter, the settings of its group in some steps as text."""
    optimizer = make(parameters)
    scheduler = None if schedule is None else schedule(optimizer)
    found: dict[int, str] = defaultdict(str)
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            settings = sorted((key, repr(group[key])) for key in group if key not in _LISTS)
            for parameter in group["params"]:
                found[id(parameter)] += repr(settings)
        if scheduler is not None:
            optimizer.step()
            with suppress(Exception):  # the schedule has ended
                scheduler.step()
    return dict(found)
