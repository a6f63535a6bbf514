"""Builds a rank's optimizer and schedule: the model file's, or AdamW with warm-up and decay."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autopar.runtime.data_parallel.buckets import HALF_DTYPES, sharding_of
from autopar.runtime.data_parallel.wrapping import buckets_of, float8_gathers
from autopar.runtime.launchers import usable_cores
from autopar.runtime.optimizer.pieces import (
    FlatShard,
    ParameterPiece,
    flat_shard,
    forget_gradients,
    gather_parameters,
    is_copy,
    local_pieces,
    note_pieces,
    spread_after_steps,
    state_of,
    watch_settings,
)
from autopar.runtime.ranks.leaving import known_place, refuse
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import cpu_generators_restored
from autopar.runtime.ranks.user_code import (
    check_same_optimizer,
    exit_on_error,
    failing_at,
    fault_of_optimizer,
    place_of,
    said_of,
)
from autopar.runtime.tensor.shards import made_like, starts_on_host

__all__ = ["adamw", "build_optimizer", "build_scheduler", "warmup_cosine"]  # for scripts

OptimizerFactory: TypeAlias = Callable[[Any], Optimizer]

MODEL, NAMED = "model", "named_parameters"  # names of a factory's argument, which say what it gets


def asked_by(factory: OptimizerFactory) -> str:
    """Return the name of the only argument of a build_optimizer."""
    return next(iter(inspect.signature(factory).parameters), "")


def made_optimizer(
    factory: OptimizerFactory, parts: Sequence[nn.Module], stepped: Sequence[nn.Parameter]
) -> Optimizer:
    """Call a factory with the argument that it names, restricted to this rank's modules.

    `stepped` are the trainable parameters, or one empty tensor for a stage that has none. Exits if
    the factory fails, or returns an object that no script can step.
    """
    name = "build_optimizer() of the model file" if place_of(factory) else "the optimizer"
    with exit_on_error(name, factory):
        optimizer = _called(factory, parts, stepped)
    if fault := fault_of_optimizer(optimizer):
        refuse(f"{name} {fault}", fix=f"look at {place_of(factory) or 'build_optimizer()'}")
    return optimizer


def _called(
    factory: OptimizerFactory, parts: Sequence[nn.Module], stepped: Sequence[nn.Parameter]
) -> Optimizer:
    asked = asked_by(factory)
    model = parts[0] if len(parts) == 1 else _Together(parts)
    if asked == MODEL and any(parameter.requires_grad for parameter in model.parameters()):
        return factory(model)
    if asked in (MODEL, NAMED):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = [(names.get(id(one), "nothing"), one) for one in stepped]
        return factory(named if asked == NAMED else _ParameterModule(dict(named)))
    return factory(stepped)


class _Together(nn.Module):
    """The stages of a rank as one module, with names of the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(parts)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of this rank's stages; those of other stages have no parameters."""
        for part in self._parts:
            yield from part.named_modules(*args, **kwargs)


class _ParameterModule(nn.Module):
    """Stands for the model on a stage without trainable parameters: one empty tensor."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name.rpartition(".")[2], parameter)


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> AdamW:
    """Build AdamW with weight decay for matrices, but not for norms and biases.

    A shard has as many dims as its parameter, so the groups are the same on all ranks. Later,
    `build_optimizer` may put pieces of parameters into the groups in place of the parameters.
    """
    every = list(parameters)
    matrices: dict[str, Any] = {"params": [one for one in every if one.dim() >= 2]}
    others = {"params": [one for one in every if one.dim() < 2], "weight_decay": 0.0}
    return AdamW([matrices, others], lr=lr, betas=betas, weight_decay=weight_decay)


def warmup_cosine(optimizer: Optimizer, *, steps: int, warmup: int, final: float) -> LambdaLR:
    """Build a schedule: linear warm-up to the optimizer's rates, then cosine decay.

    The last of the `steps` has `final` times the highest rate. The warm-up takes at most a tenth of
    the steps. Each rate depends only on the step and on `steps`, also in a training that is resumed
    with more steps.
    """
    warmup = min(warmup, steps // 10)

    def factor(taken: int) -> float:
        if taken < warmup:
            return (taken + 1) / (warmup + 1)
        progress = min(1.0, (taken - warmup) / max(1, steps - 1 - warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


# These optimizers treat a parameter as a matrix, or all parameters as one vector, so they cannot
# step slices.
NEED_WHOLE_PARAMETERS = ("Muon", "Adafactor", "LBFGS")


def build_optimizer(
    model_parts: Sequence[nn.Module],
    factory: OptimizerFactory,
    *,
    mesh: Mesh,
    zero: int = 0,
    lr: float | None = None,
) -> Optimizer:
    """Build an optimizer that steps this rank's shards of the modules.

    In place of 16-bit or sharded parameters, and under ZeRO-1, the optimizer gets pieces: fp32
    master weights and flat slices, all plain tensors. Masters have the unrounded values of the
    constructor or the file: the factory gets fp32 parameters, which are rounded afterwards. Before
    a step gradients are copied to the pieces; after it new values are copied back. Schedulers and
    param_groups stay the user's own. `lr`, if given, replaces all rates.
    """
    parameters = {id(one): one for part in model_parts for one in part.parameters()}
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    # torch refuses an optimizer without parameters; a stage of frozen layers has none.
    stepped = trainable or [nn.Parameter(torch.empty(0, device=mesh.device))]
    optimizer = made_optimizer(factory, model_parts, stepped)
    check_same_optimizer(optimizer, mesh)
    _prefer_fused(optimizer)
    if offloads(model_parts) and mesh.device.type == "cuda":
        # the step on the CPU uses this rank's share of the cores; torchrun leaves it one thread
        torch.set_num_threads(max(1, usable_cores() // known_place().local_world_size))
    _use_pieces(optimizer, trainable, model_parts, zero=zero, mesh=mesh)
    watch_settings(optimizer)
    optimizer.register_step_pre_hook(_lay_gradients_like_parameters)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    return optimizer


def _use_pieces(
    optimizer: Optimizer,
    trainable: list[nn.Parameter],
    model_parts: Sequence[nn.Module],
    *,
    zero: int,
    mesh: Mesh,
) -> None:
    """Replace parameters by pieces in the optimizer, where it cannot step them directly."""
    in_buckets = [one for part in model_parts if (one := buckets_of(part)) is not None]
    is_offloaded = any(one.link is not None for one in in_buckets)
    shards_states = is_offloaded or (sharding_of(zero).steps_parts and mesh.shard.size > 1)
    masters: dict[int, Tensor] = {}  # fp32 values, by parameter id
    for one in in_buckets:
        if shards_states or one.half is not None:
            one.attach()
        if not shards_states:
            masters |= one.narrow()
    if not shards_states and all(
        not isinstance(one, DTensor) and one.dtype not in HALF_DTYPES for one in trainable
    ):
        return
    if type(optimizer).__name__ in NEED_WHOLE_PARAMETERS and (
        shards_states or any(isinstance(parameter, DTensor) for parameter in trainable)
    ):
        divides = "offloading" if is_offloaded else f"ZeRO-{zero}"
        raise RuntimeError(
            f"{type(optimizer).__name__} needs whole parameters, and {divides} gives each rank "
            "parts of them: plan with zero 0 and --offload none, or choose an optimizer that works "
            "element by element (AdamW, SGD)"
        )
    if shards_states:
        if len(in_buckets) < len(model_parts):
            raise RuntimeError("wrap and build_optimizer were given different ZeRO levels")
        shards = [
            flat_shard(bucket, one.half, mesh.device)
            for one in in_buckets
            for bucket in one.buckets
        ]
        _step_shards(optimizer, trainable, shards)
    else:
        _step_pieces(optimizer, trainable, local_pieces(trainable, masters))
        if compute_scales := float8_gathers(model_parts, mesh.shard):
            spread_after_steps(optimizer, compute_scales)


def offloads(model_parts: Sequence[nn.Module]) -> bool:
    """Whether the optimizer steps in the host's memory."""
    return any(starts_on_host(one) for part in model_parts for one in part.parameters())


def _step_shards(
    optimizer: Optimizer, trainable: list[nn.Parameter], shards: Sequence[FlatShard]
) -> None:
    """Make the optimizer step this rank's parts, and fetch and all-gather them after each step."""
    _step_pieces(optimizer, trainable, [piece for shard in shards for piece in shard.pieces])
    zero_grad = optimizer.zero_grad

    def forget_and_zero(set_to_none: bool = True) -> None:
        forget_gradients(shards)
        zero_grad(set_to_none)

    def gather_and_forget(*_: Any) -> None:
        for shard in shards:
            shard.give_values()
        gather_parameters(shards)
        forget_gradients(shards)

    spread_after_steps(optimizer, gather_and_forget)
    optimizer.zero_grad = forget_and_zero  # type: ignore[method-assign]


def _lay_gradients_like_parameters(optimizer: Optimizer, *_: Any) -> None:
    """Copy gradients whose memory order differs from their parameter's.

    torch's fused kernels go through the memory of gradient and parameter in order, so a
    channels-last convolution would get wrong updates (torch 2.13, AdamW and SGD on a CPU).
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _prefer_fused(optimizer: Optimizer) -> None:
    """Use the fused kernel unless the user chose a kernel.

    On a CPU core, fused AdamW takes 4.7 ms for 100 layers of width 256, and torch's default 16 ms.
    """
    if type(optimizer) not in (Adam, AdamW, SGD):
        return
    for group in optimizer.param_groups:
        is_free = group.get("foreach") is None and group.get("fused") is None
        if is_free and not (group.get("differentiable") or group.get("capturable")):
            group["fused"] = True


def _step_pieces(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], pieces: Sequence[ParameterPiece]
) -> None:
    """Replace parameters by pieces in the optimizer, and keep the two in sync."""
    note_pieces(optimizer, pieces)
    by_parameter = defaultdict[int, list[ParameterPiece]](list)
    for piece in pieces:
        by_parameter[id(piece.parameter)].append(piece)
        made_like(piece.target, piece.parameter)
    for group in optimizer.param_groups:
        group["params"] = [p.target for w in group["params"] for p in by_parameter.get(id(w), ())]
    for parameter, state in list(optimizer.state.items()):
        del optimizer.state[parameter]
        for piece in by_parameter.get(id(parameter), ()):
            optimizer.state[piece.target] = {k: state_of(piece, v) for k, v in state.items()}
    owners = tuple(parameters)

    def take_gradients(*_: Any) -> None:
        for piece in pieces:
            piece.take_gradient()

    def give_values(*_: Any) -> None:
        copies = [one for one in pieces if is_copy(one) and not one.is_far]
        if copies:
            torch._foreach_copy_([p.place for p in copies], [p.target.data for p in copies])

    def zero_grad(set_to_none: bool = True) -> None:
        for piece in pieces:
            piece.target.grad = None
        for parameter in owners:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    first = optimizer.register_step_pre_hook(take_gradients)
    # The user's own hooks expect gradients, so ours runs first.
    optimizer._optimizer_step_pre_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    spread_after_steps(optimizer, give_values)
    # zero_grad must clear the parameters' gradients, not only the pieces'.
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


SchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]

_NAME = "build_scheduler() of the model file"
_REHEARSING_SECONDS = 2.0  # for trying out a schedule; a million steps would take longer


def build_scheduler(
    factory: SchedulerFactory, optimizer: Optimizer, *, steps: int, mesh: Mesh
) -> LRScheduler:
    """Build a scheduler; exit if building it or any of its steps fails.

    The first rank tries its steps, for at most 2 s, on an optimizer of empty parameters.
    """
    with exit_on_error(_NAME, factory):
        scheduler = factory(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        found = f"{_NAME} returns a {type(scheduler).__name__}, which has no step()"
        refuse(found, fix="return a schedule of steps, as those of torch.optim.lr_scheduler")
    if mesh.rank == 0 and not mesh.is_dry_run:
        with cpu_generators_restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an optimizer that is not stepped
            _rehearse(factory, optimizer, steps)
    return scheduler


def _rehearse(factory: SchedulerFactory, optimizer: Optimizer, steps: int) -> None:
    scheduler: Any = None
    with suppress(Exception):  # a scheduler may read more from an optimizer than its settings
        scheduler = factory(_settings_of(optimizer))
    if scheduler is None:
        return
    until = time.monotonic() + _REHEARSING_SECONDS
    for step in range(1, steps + 1):
        try:
            scheduler.step()
        except Exception as error:
            place = failing_at(error) or place_of(factory)
            refuse(
                f"the schedule of {_NAME} fails in step {step:,} of {steps:,}: {said_of(error)}",
                fix=f"let it last for all steps, or train fewer (--steps): look at {place}",
            )
        if time.monotonic() > until:
            return


def _settings_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings, whose parameters have no values."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [nn.Parameter(torch.empty(0))]}
        for group in optimizer.param_groups
    ]
    return Optimizer(groups, dict(optimizer.defaults))
