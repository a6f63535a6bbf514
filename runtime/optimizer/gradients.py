"""Sums, clips and scales gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.data_parallel.buckets import Span
from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import ComingSum, summed
from autopar.runtime.tensor.shards import is_listed

__all__ = [
    "LossScale",
    "clip_by_global_norm",
    "multiply_gradients",
    "sum_replicated",
]  # for scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradient:
    """The part of a parameter's gradient on this rank; `value` is its memory, not a copy."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    span: Span | None = None  # of the flattened gradient; None: the whole local gradient

    @property
    def is_sharded(self) -> bool:
        """Whether the other ranks of mesh.shard hold other elements of the gradient."""
        if self.span is not None:
            return True
        gradient = self.parameter.grad
        return isinstance(gradient, DTensor) and any(one.is_shard() for one in gradient.placements)


def local_gradients(parts: Iterable[nn.Module]) -> list[LocalGradient]:
    """Return every gradient once, also for a parameter that two parts share."""
    found: dict[int, LocalGradient] = {}
    for part in parts:
        for one in _gradients_of(part):
            found.setdefault(id(one.parameter), one)
    return list(found.values())


def gradient_memory(parts: Iterable[nn.Module]) -> list[Tensor]:
    """Return all gradients of this process in few tensors: each bucket's memory, and the others."""
    found, others = [], []
    for part in parts:
        buckets = buckets_of(part)
        if buckets is None or not buckets.buckets:
            others.append(part)
        else:
            found += [tensor for bucket in buckets.buckets for tensor in bucket.memory()]
    return found + [one.value for one in local_gradients(others)]


def made_gradient(part: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient, zeros if the loss did not reach the parameter.

    Used for parameters tied over pipeline stages. Under ZeRO-1, all stages hold the same part of
    such a parameter only if it has its own bucket (`apart`).
    """
    buckets = buckets_of(part)
    for bucket in () if buckets is None else buckets.buckets:
        here = [n for n, other in enumerate(bucket.parameters) if other is parameter]
        if bucket.is_apart and here:
            if bucket.shard.size > 1 and len(bucket.parameters) > 1:
                raise RuntimeError(
                    "a parameter that is tied over pipeline stages shares its bucket with other "
                    "parameters: name it in wrap(…, apart=[tie.names for tie in ties])"
                )
            return bucket.made(here[0])
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return local(parameter.grad)


def has_sharded_gradients(parts: Iterable[nn.Module]) -> bool:
    """Whether ranks of mesh.shard hold different elements of gradients.

    All ranks return the same answer.
    """
    for part in parts:
        buckets = buckets_of(part)
        if buckets is not None:  # with buckets there are no DTensors
            if buckets.averaging.shard.size > 1:
                return True
        elif any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            return True
    return False


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradients_of(part: nn.Module) -> Iterator[LocalGradient]:
    buckets = buckets_of(part)
    # cached, because looking up names takes 0.1 ms for 30 parameters
    if buckets is not None and buckets.trainable:
        named = buckets.trainable
    else:
        named = dict(part.named_parameters())
    for name, parameter in named.items():
        if parameter.grad is not None:
            yield LocalGradient(name=name, parameter=parameter, value=local(parameter.grad))
    if buckets is None:
        return
    names = {id(parameter): name for name, parameter in named.items()}
    for bucket in buckets.buckets:
        for span, mean in bucket.reduced_parts() if bucket.is_apart else ():
            parameter = bucket.parameters[span.place]
            yield LocalGradient(
                name=names[id(parameter)], parameter=parameter, value=mean, span=span
            )


# larger tensors are sent one by one: copying them together costs more than another message
_LARGE_BYTES = 2**20


@torch.no_grad()
def sum_replicated(model_parts: Sequence[nn.Module], names: Collection[str], axis: Axis) -> None:
    """Sum the partial gradients of whole parameters (layout R) over the axis, in place.

    A large gradient has its own message; small ones are sent together, one message per dtype.
    """
    if axis.size == 1:
        return
    partial = [one.value for one in local_gradients(model_parts) if is_listed(one.name, names)]
    runs = _end_to_end(one for one in partial if one.numel() and one.is_contiguous())
    coming = [ComingSum(run, axis) for run in runs if run.nbytes >= _LARGE_BYTES]
    small = [run for run in runs if run.nbytes < _LARGE_BYTES]
    small += [one for one in partial if not one.is_contiguous()]
    for same in _by_dtype(small):
        total = summed(torch.cat([one.reshape(-1) for one in same]), axis)
        pieces = torch.split(total, [one.numel() for one in same])
        for one, piece in zip(same, pieces, strict=True):
            one.copy_(piece.view_as(one))
    for sums in coming:
        sums.value()


def _end_to_end(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors flattened; neighbours in the same memory become one tensor.

    A bucket lays gradients out in the backward's order, so each gradient lies right before that of
    the preceding parameter of the model.
    """
    runs: list[Tensor] = []
    for flat in (one.view(-1) for one in tensors):
        merged = _merged(runs[-1], flat) if runs else None
        if merged is None:
            runs.append(flat)
        else:
            runs[-1] = merged
    return runs


def _merged(one: Tensor, other: Tensor) -> Tensor | None:
    first, second = sorted((one, other), key=Tensor.storage_offset)
    is_one_memory = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    end = first.storage_offset() + first.numel()
    if one.dtype != other.dtype or not is_one_memory or end != second.storage_offset():
        return None
    return first.as_strided((first.numel() + second.numel(),), (1,))


@torch.no_grad()
def clip_by_global_norm(
    model_parts: Sequence[nn.Module],
    max_norm: float | None,
    mesh: Mesh,
    *,
    split: Collection[str] = (),
    tied: frozenset[str] = frozenset(),
) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most max_norm; return the norm.

    Without a max_norm, or with 0, gradients stay as they are, and 0 is returned in place of the
    norm. `split` has the names of the parameters that are cut over the tensor axis; * in a name
    stands for any number. `tied` names parameters that another pipeline stage counts in the norm.
    If several ranks hold a parameter whole, the first of them counts it. Ranks with the same
    gradients (copies on the data axis) exchange no message.
    """
    if not max_norm:
        return torch.zeros((), device=mesh.device)
    # the axes whose ranks hold different gradients, the same on all ranks
    is_sharded = mesh.shard.size > 1 and has_sharded_gradients(model_parts)
    sharded = (mesh.shard,) if is_sharded else ()
    axes = tuple(axis for axis in (mesh.tensor, *sharded, mesh.pipeline) if axis.size > 1)
    if not tied and _counts_everything(model_parts, mesh, axes):
        gradients = counted = gradient_memory(model_parts)
    else:
        gradients, counted = _gradients(model_parts, mesh, axes, split=split, tied=tied)
    norm = _sum_of_squares(counted, mesh, axes).sqrt_()
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for same in _by_dtype(gradients):
            torch._foreach_mul_(same, scale.to(same[0]))
    return norm


def _gradients(
    model_parts: Sequence[nn.Module],
    mesh: Mesh,
    axes: Sequence[Axis],
    *,
    split: Collection[str],
    tied: frozenset[str],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return all gradients, and those that this process counts in the norm."""
    gradients, counted = [], []
    met = set(tied)  # a name that occurs again is a copy of a tied parameter in another part
    for one in local_gradients(model_parts):
        gradients.append(one.value)
        if one.name not in met and _counts_here(one, is_listed(one.name, split), mesh, axes):
            counted.append(one.value)
        met.add(one.name)
    return gradients, counted


def _counts_everything(parts: Sequence[nn.Module], mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """Whether this rank counts all of its gradients in the norm.

    fully_shard keeps some gradients whole on every rank; only the first rank counts those.
    """
    are_buckets_cut = buckets_of(parts[0]) is not None
    is_alone = mesh.shard not in axes or mesh.shard.rank == 0 or are_buckets_cut
    return len(parts) == 1 and mesh.tensor.rank == 0 and is_alone


def _counts_here(one: LocalGradient, is_split: bool, mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """Whether no lower rank of these axes counts the same elements."""
    if mesh.tensor in axes and mesh.tensor.rank and not is_split:
        return False
    return mesh.shard not in axes or mesh.shard.rank == 0 or one.is_sharded


def _sum_of_squares(gradients: list[Tensor], mesh: Mesh, axes: Sequence[Axis]) -> Tensor:
    """Sum squares over this process and the axes; bf16 is accumulated in float32."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for same in _by_dtype(gradients):
        norms = torch._foreach_norm(
            same, 2, dtype=torch.promote_types(same[0].dtype, torch.float32)
        )
        total += torch.stack(norms).double().square_().sum().to(total)
    for axis in axes:
        total = summed(total, axis)
    return total


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())


def multiply_gradients(model_parts: Iterable[nn.Module], factor: float) -> None:
    """Multiply all gradients of this process by a number."""
    for gradients in _by_dtype(gradient_memory(model_parts)):
        torch._foreach_mul_(gradients, factor)


LEAST = 2.0**-10  # with a smaller scale, only gradients beyond 6·10^7 would overflow


class LossScale:
    """A loss scale that halves after an overflow on any rank.

    It doubles after every `steps_until_growth` steps without an overflow. In a step: backward of
    `loss * scale.value`, then `scale.unscale(parts)`. If that returns True, the gradients are
    finite: clip them and step the optimizer.
    """

    def __init__(
        self, mesh: Mesh, *, initial: float = 2.0**15, steps_until_growth: int = 2000
    ) -> None:
        self.value = initial
        self.fits = True  # whether all gradients of the last step were finite
        self.calm_steps = 0  # without overflow since the scale changed
        self._mesh = mesh
        self._steps_until_growth = steps_until_growth

    def go_on(self, value: float, calm_steps: int) -> None:
        """Restore the state of an earlier scale."""
        self.value, self.calm_steps = value, calm_steps

    def unscale(self, model_parts: Iterable[nn.Module]) -> bool:
        """Divide the gradients by the scale, and return whether they are finite on all ranks.

        This also updates the scale for the next step, equally on all ranks.
        """
        single: dict[str, Any] = {"device": self._mesh.device, "dtype": torch.float32}
        overflow, inverse = torch.zeros(1, **single), torch.full((1,), 1.0 / self.value, **single)
        for gradients in _by_dtype(gradient_memory(model_parts)):
            found = overflow.to(gradients[0].device)
            factor = inverse.to(gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)
            overflow.copy_(found)
        if self._mesh.world.size > 1:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._mesh.world.group)
        self.fits = self._mesh.is_dry_run or not bool(overflow)  # a dry run has no values
        if not self.fits:
            self.value, self.calm_steps = self.value / 2.0, 0
            if self.value < LEAST:
                refuse(
                    f"gradients overflow even with the loss scale {2 * self.value:g}: some "
                    "activation is beyond what fp16 holds (65,504), or the training diverges",
                    fix="train with --dtype float32, in bf16 (plan again), or with a lower --lr",
                )
            return False
        self.calm_steps += 1
        if self.calm_steps == self._steps_until_growth:
            self.value, self.calm_steps = self.value * 2.0, 0
        return True
