"""Sums and clips gradients such that every element of the model counts once."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.transport import summed


@torch.no_grad()
def sum_replicated(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Sum the partial gradients of R parameters over the axis, one message per dtype."""
    if axis.size == 1:
        return
    partial = [local(p.grad) for p in parameters if p.grad is not None]
    for gradients in _by_dtype(partial):
        total = summed(torch.cat([gradient.reshape(-1) for gradient in gradients]), axis)
        pieces = torch.split(total, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


@torch.no_grad()
def clip_by_global_norm(
    model_parts: Sequence[nn.Module],
    max_norm: float,
    mesh: Mesh,
    *,
    split: frozenset[str],
    tied: frozenset[str] = frozenset(),
) -> Tensor:
    """Scale all gradients so that the norm of the whole model's is at most max_norm; return it.

    `split` names the parameters that are cut over the tensor axis, `tied` those that another
    pipeline stage counts. A parameter that is whole on several ranks is counted by the first. Ranks
    that hold the same gradients (copies of the data axis) do not ask each other: none is asked
    where every gradient is whole.
    """
    parameters = _parameters(model_parts)
    axes = _axes_of_shares(parameters, mesh)
    gradients, counted = [], []
    met = set(tied)  # a name that comes again is a copy, in another part, of a tied parameter
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            held = local(gradient)
            gradients.append(held)
            if name not in met and _counts_here(gradient, name in split, mesh, axes):
                counted.append(held)
            met.add(name)
    norm = _sum_of_squares(counted, mesh, axes).sqrt_()
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for same in _by_dtype(gradients):
            torch._foreach_mul_(same, scale.to(same[0].dtype))
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parameters(model_parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Find every parameter once, also one that two parts share."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in model_parts:
        module = part.module if isinstance(part, DistributedDataParallel) else part
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def _axes_of_shares(parameters: Sequence[tuple[str, nn.Parameter]], mesh: Mesh) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different gradients, by what all of their ranks know."""
    is_sharded = mesh.shard.size > 1 and any(isinstance(p, DTensor) for _, p in parameters)
    sharded = (mesh.shard,) if is_sharded else ()
    return tuple(axis for axis in (mesh.tensor, *sharded, mesh.pipeline) if axis.size > 1)


def _counts_here(gradient: Tensor, is_split: bool, mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """Tell whether no lower rank of these axes counts the same elements."""
    if mesh.tensor in axes and mesh.tensor.rank and not is_split:
        return False
    if mesh.shard not in axes or mesh.shard.rank == 0:
        return True
    return isinstance(gradient, DTensor) and any(one.is_shard() for one in gradient.placements)


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
