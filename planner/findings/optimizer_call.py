"""Calls build_optimizer on stand-ins for the parameters, and tries build_scheduler's schedule.

Also finds the parameters that a gradient of the loss reaches. A teacher under `torch.no_grad()`, or
with detached outputs, has weights that require gradients but get none. An optimizer skips
parameters without a gradient; with zero gradients, its weight decay would change them.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from autopar.planner.errors import InputError, text_of
from autopar.planner.findings import ScheduleEnd
from autopar.planner.graph.graph import Graph
from autopar.planner.model.guard import user_location
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import state_scope


def learning_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that have a gradient after a backward of the loss."""
    constant = (op for op in graph.ops if not graph.learns(op))
    learning = graph.index.needed_for([graph.loss], without=constant)
    reached = {graph.loss}.union(*(op.inputs for op in learning))
    return frozenset(one.name for one in graph.parameters if one.trainable) & reached


Make: TypeAlias = Callable[[Sequence[nn.Parameter]], Any]

NAME = "stand_in_for"  # an attribute of a stand-in


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
