"""Calls build_optimizer on stand-ins for the parameters, and tries build_scheduler's schedule.

Also finds the parameters that a gradient of the loss reaches. A teacher under `torch.no_grad()`, or
with detached outputs, has weights that require gradients but get none. An optimizer skips
parameters without a gradient; with zero gradients, its weight decay would change them.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from autopar.planner.errors import InputError, text_of
from autopar.planner.findings import ParameterPart, ScheduleEnd
from autopar.planner.graph.graph import Graph
from autopar.planner.model.guard import user_location
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import state_scope
from autopar.planner.model.without_memory import marked_like


def learning_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that have a gradient after a backward of the loss."""
    constant = (op for op in graph.ops if not graph.learns(op))
    learning = graph.index.needed_for([graph.loss], without=constant)
    reached = {graph.loss}.union(*(op.inputs for op in learning))
    return frozenset(one.name for one in graph.parameters if one.trainable) & reached


Make: TypeAlias = Callable[[Sequence[nn.Parameter]], Any]

NAME = "stand_in_for"  # an attribute of a stand-in
STEPS = 3  # in which an optimizer is tried
_STEPS_OF_OWN_CODE = 12  # some code does more every fifth or tenth step
LARGEST_DIFFERENCE = 1e-3  # relative to the largest update; larger differences count
_LARGEST_DIM = 4  # larger dims are cut to this size in a stand-in


class StandIn(NamedTuple):
    """A small copy of a parameter."""

    name: str
    size: tuple[int, ...]
    original: nn.Parameter | None  # an optimizer may read its class and attributes


def stand_ins_of(graph: Graph, built: nn.Module | None) -> list[StandIn]:
    """Return a small stand-in for each trainable parameter."""
    originals = dict(built.named_parameters()) if built is not None else {}
    return [
        StandIn(
            one.name,
            tuple(min(_LARGEST_DIM, size.at(1)) for size in one.shape),
            originals.get(one.name),
        )
        for one in graph.parameters
        if one.trainable
    ]


def parameters_for(stand_ins: Sequence[StandIn]) -> list[nn.Parameter]:
    """Return parameters with random values, marked like the originals."""
    made = torch.Generator().manual_seed(0)
    return [_marked(torch.randn(one.size, generator=made), one) for one in stand_ins]


def _marked(values: Tensor, one: StandIn) -> nn.Parameter:
    found = nn.Parameter(values)
    if one.original is not None:
        marked_like(found, one.original)
    setattr(found, NAME, one.name)
    return found


def stepped_gradients(
    optimizer: Any, parameters: Sequence[nn.Parameter]
) -> Iterator[Sequence[Tensor]]:
    """Yield a gradient for each parameter in each step in which an optimizer is to be tried.

    Each has a direction that stays, as in a training: some step sizes grow only then.
    """
    made = torch.Generator().manual_seed(1)
    staying = [torch.randn(one.shape, generator=made) for one in parameters]
    for _ in range(_STEPS_OF_OWN_CODE if _has_own_code(optimizer) else STEPS):
        yield [one + torch.randn(one.shape, generator=made) / 2 for one in staying]


def _has_own_code(optimizer: Any) -> bool:
    """Whether the steps of an optimizer run code that is not torch's."""
    step = inspect.unwrap(type(optimizer).step)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return not step.__module__.startswith("torch.") or any(hooks)


_Cut: TypeAlias = Callable[[Tensor], Tensor]  # returns a part of a parameter


def _first_half(dim: int) -> _Cut:
    return lambda whole: whole.chunk(2, dim)[0] if dim < whole.dim() else whole


_CUTS = {
    ParameterPart.SHARD: (_first_half(0), _first_half(1)),
    ParameterPart.ROWS: (_first_half(0),),
    ParameterPart.FLAT: (lambda whole: whole.flatten().chunk(2)[0],),
}


def unlike_parts(
    make: Make, stand_ins: Sequence[StandIn], kinds: Sequence[ParameterPart]
) -> tuple[ParameterPart, ...]:
    """Return the kinds of parts that an optimizer does not step as it steps the whole parameters.

    Its step, or the settings of its groups, then depend on sizes or numbers of dims.
    """
    if not kinds:
        return ()
    whole = _updates_of_parts(make, stand_ins, lambda one: one, is_built=True)
    largest = max((float(one.abs().max()) for one in whole), default=0.0)

    def is_alike(cut: _Cut, kind: ParameterPart) -> bool:
        is_built = kind is ParameterPart.SHARD
        try:
            found = _updates_of_parts(make, stand_ins, cut, is_built=is_built)
        except Exception:  # build_optimizer, or the step, takes no such parts
            return False
        differences = (
            float((own - cut(one)).abs().max()) for own, one in zip(found, whole, strict=True)
        )
        return all(one <= LARGEST_DIFFERENCE * largest for one in differences)

    return tuple(kind for kind in kinds if not all(is_alike(cut, kind) for cut in _CUTS[kind]))


def _updates_of_parts(
    make: Make, stand_ins: Sequence[StandIn], cut: _Cut, *, is_built: bool
) -> list[Tensor]:
    """Return the change of a part of each parameter over some steps.

    Unless the optimizer `is_built` for the parts, it is made for the whole parameters, and steps
    the parts in their place, as in scripts under ZeRO.
    """
    wholes = parameters_for(stand_ins)
    # views: code behind a step may change the whole parameters that it was given
    parts = [_marked(cut(one.detach()), of) for one, of in zip(wholes, stand_ins, strict=True)]
    before = [one.detach().clone() for one in parts]
    optimizer = make(parts if is_built else wholes)
    if not is_built:
        _replace(optimizer, dict(zip(wholes, parts, strict=True)), cut)
    for gradients in stepped_gradients(optimizer, wholes):
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = cut(gradient).clone()
        optimizer.step()
    return [one.detach() - was for one, was in zip(parts, before, strict=True)]


def _replace(optimizer: Any, parts: dict[nn.Parameter, nn.Parameter], cut: _Cut) -> None:
    """Put parts of parameters in their place in an optimizer, with parts of their states."""
    for group in optimizer.param_groups:
        group["params"] = [parts[one] for one in group["params"]]
    for whole in [one for one in optimizer.state if one in parts]:
        optimizer.state[parts[whole]] = {
            key: cut(one).clone() if isinstance(one, Tensor) and one.shape == whole.shape else one
            for key, one in optimizer.state.pop(whole).items()
        }


def make_on_stand_ins(model_file: ModelFile, graph: Graph, model: nn.Module | None) -> Make:
    """Return a function that makes the optimizer for stand-ins.

    It passes them as build_optimizer takes them: as a list, as pairs with their names, or in the
    model.
    """
    build = model_file.build_optimizer
    if build is None:
        return lambda parameters: AdamW(parameters)
    asked = next(iter(inspect.signature(build).parameters), "")
    if asked == "named_parameters":
        return lambda parameters: build([(getattr(one, NAME), one) for one in parameters])
    if asked == "model" and model is not None:
        aliases = {one.name: one.aliases for one in graph.parameters}
        return lambda parameters: build(_holding(model, parameters, aliases))
    return build


def _holding(
    model: nn.Module, parameters: Sequence[nn.Parameter], aliases: dict[str, tuple[str, ...]]
) -> nn.Module:
    """Return the model with stand-ins in place of these parameters, and no other parameters."""
    given = {alias: one for one in parameters for alias in aliases[getattr(one, NAME)]}
    given |= {getattr(one, NAME): one for one in parameters}
    for prefix, module in model.named_modules():
        for name in module._parameters:
            module._parameters[name] = given.get(f"{prefix}.{name}" if prefix else name)
    return model


_HOOKS = "_optimizer_step_pre_hooks"  # set by Optimizer.__init__


def check_optimizer(made: Any, where: str) -> None:
    """Raise if scripts cannot register step hooks on an optimizer, or if parameters come twice.

    Before a step, a script's hook hands the optimizer its gradients; after it, another hook stores
    the new parameters.
    """
    name, is_one = type(made).__name__, isinstance(made, Optimizer)
    if is_one and hasattr(made, _HOOKS):
        _check_once(made, where)
        return
    lacks = "whose __init__ never called super().__init__" if is_one else "not a torch Optimizer"
    raise InputError(
        f"build_optimizer returns a {name}, {lacks}",
        where=where,
        expected="a torch.optim.Optimizer, which may wrap another one",
        fix=f"derive {name} from torch.optim.Optimizer, and call super().__init__(…) first in "
        "its __init__; a wrapper passes the inner optimizer's groups: "
        "super().__init__(inner.param_groups, {})",
    )


def _check_once(optimizer: Optimizer, where: str) -> None:
    """Raise if parameters would be stepped more than once."""
    counts = Counter(id(one) for group in optimizer.param_groups for one in group["params"])
    twice = sum(count > 1 for count in counts.values())
    if twice:
        raise InputError(
            f"build_optimizer gives the optimizer {twice} parameters more than once",
            where=where,
            fix="list each parameter once, in one group",
        )


def check_step(called: Any, maker: str, fix: str, where: str) -> None:
    """Raise if the step of an optimizer or scheduler takes arguments, or is missing."""
    kind = type(called)  # the object's own `step` may be a scheduler's wrapper
    name, step = kind.__name__, getattr(kind, "step", None)
    if step is None:
        raise InputError(
            f"{maker} returns a {name}, which has no step()", where=where, fix=f"return {fix}"
        )
    try:
        inspect.signature(step).bind(called)
    except TypeError as error:
        raise InputError(
            f"{name}.step cannot be called without arguments: {error}",
            where=where,
            expected=f"{name}.step(), once after each step's gradients",
            fix=fix,
        ) from None


def own_tensors(optimizer: Any) -> tuple[str, ...]:
    """Return the attributes of an optimizer, or of an inner one, that hold tensors like parameters.

    Such a tensor has the shape of a parameter, or is one vector for all parameters. It is not in
    the optimizer's state, so no checkpoint stores it.
    """
    stepped = [one for group in optimizer.param_groups for one in group["params"]]
    given, shapes = set(map(id, stepped)), {one.shape for one in stepped}
    shapes.add(torch.Size([sum(one.numel() for one in stepped)]))  # all in one vector
    found: list[str] = []
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            found += (f"{name}.{inner}" for inner in own_tensors(value))
        elif name not in ("state", "param_groups"):
            tensors = (one for one in tree_leaves(value) if isinstance(one, Tensor))
            if any(one.shape in shapes and id(one) not in given for one in tensors):
                found.append(name)
    return tuple(found)


TRIED_STEPS = 100  # the number of steps of a script without --steps


def schedule_end(model_file: ModelFile, scheduler: Any) -> ScheduleEnd | None:
    """Step a schedule; return where it fails, or None. Raises if the first step fails."""
    before = state_scope(model_file.path).snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
            for step in range(1, TRIED_STEPS + 1):
                try:
                    scheduler.step()
                except Exception as error:
                    return _ended(step, error, model_file)
    finally:
        before.put_back()
    return None


def _ended(step: int, error: Exception, model_file: ModelFile) -> ScheduleEnd:
    said = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]
    where = user_location(error, model_file.path)
    if step == 1:
        found = f"the first step of build_scheduler's schedule fails: {said}"
        raise InputError(found, where=where) from None
    return ScheduleEnd(step, said, where)
