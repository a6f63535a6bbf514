"""Sums and clips gradients such that every element of the model counts once."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.model.layer_names import is_listed
from autopar.runtime.optimizer.held_gradients import (
    HeldGradient,
    gradient_memory,
    held_gradients,
    shares_gradients_out,
)
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import ComingSum, summed

_LARGE_BYTES = 2**20  # of a message of its own: a copy of it would take longer than its latency


@torch.no_grad()
def sum_replicated(model_parts: Sequence[nn.Module], names: Collection[str], axis: Axis) -> None:
    """Sum the partial gradients of R parameters over the axis, those of a bucket where they lie.

    What is large has a message of its own; small gradients travel together, one message per dtype.
    """
    if axis.size == 1:
        return
    partial = [one.held for one in held_gradients(model_parts) if is_listed(one.name, names)]
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
    """Return tensors as flat ones, those of one memory that touch as one.

    Buckets have gradients in the order of the backward: the next one lies before the last one.
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
    """Scale all gradients so that the norm of the whole model's is at most max_norm; return it.

    Without a max_norm, or with 0, gradients stay as they are, and no norm is asked for.
    `split` names the parameters that are cut over the tensor axis, as they are or with stars,
    `tied` those that another
    pipeline stage counts. A parameter that is whole on several ranks is counted by the first. Ranks
    that hold the same gradients (copies of the data axis) do not ask each other: none is asked
    where every gradient is whole.
    """
    if not max_norm:
        return torch.zeros((), device=mesh.device)
    axes = _axes_of_shares(model_parts, mesh)
    if not tied and _counts_everything(model_parts, mesh, axes):
        gradients = counted = gradient_memory(model_parts)
    else:
        gradients, counted = _gradients(model_parts, mesh, axes, split=split, tied=tied)
    norm = _sum_of_squares(counted, mesh, axes).sqrt_()
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for same in _by_dtype(gradients):
            torch._foreach_mul_(same, scale.to(same[0].dtype))
    return norm


def _axes_of_shares(model_parts: Sequence[nn.Module], mesh: Mesh) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different gradients, by what all of their ranks know."""
    is_sharded = mesh.shard.size > 1 and shares_gradients_out(model_parts)
    sharded = (mesh.shard,) if is_sharded else ()
    return tuple(axis for axis in (mesh.tensor, *sharded, mesh.pipeline) if axis.size > 1)


def _gradients(
    model_parts: Sequence[nn.Module],
    mesh: Mesh,
    axes: Sequence[Axis],
    *,
    split: Collection[str],
    tied: frozenset[str],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return all gradients, and those of them that count in the norm of this process."""
    gradients, counted = [], []
    met = set(tied)  # a name that comes again is a copy, in another part, of a tied parameter
    for one in held_gradients(model_parts):
        gradients.append(one.held)
        if one.name not in met and _counts_here(one, is_listed(one.name, split), mesh, axes):
            counted.append(one.held)
        met.add(one.name)
    return gradients, counted


def _counts_everything(parts: Sequence[nn.Module], mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """Tell whether no lower rank has any gradient that is here: fully_shard leaves some whole."""
    are_buckets_cut = buckets_of(parts[0]) is not None
    is_alone = mesh.shard not in axes or mesh.shard.rank == 0 or are_buckets_cut
    return len(parts) == 1 and mesh.tensor.rank == 0 and is_alone


def _counts_here(one: HeldGradient, is_split: bool, mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """Tell whether no lower rank of these axes counts the same elements."""
    if mesh.tensor in axes and mesh.tensor.rank and not is_split:
        return False
    return mesh.shard not in axes or mesh.shard.rank == 0 or one.is_sharded


def _sum_of_squares(gradients: list[Tensor], mesh: Mesh, axes: Sequence[Axis]) -> Tensor:
    """Sum over this process and those of the axes; norms of bf16 are taken in float32."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for same in _by_dtype(gradients):
        norms = torch._foreach_norm(
            same, 2, dtype=torch.promote_types(same[0].dtype, torch.float32)
        )
        total += torch.stack(norms).double().square_().sum()
    for axis in axes:
        total = summed(total, axis)
    return total


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())
