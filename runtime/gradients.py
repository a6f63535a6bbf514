"""Sums and clips gradients such that every element of the model counts once."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
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
    pipeline stage counts. A parameter that is whole on several ranks is counted by the first.
    """
    gradients, counted = [], []
    met = set(tied)  # a name that comes again is a copy, in another part, of a tied parameter
    for name, gradient in _gradients(model_parts):
        gradients.append(local(gradient))
        if name not in met and _counts_here(gradient, name in split, mesh):
            counted.append(local(gradient))
        met.add(name)
    norm = _sum_of_squares(counted, mesh).sqrt_()
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for same in _by_dtype(gradients):
            torch._foreach_mul_(same, scale.to(same[0].dtype))
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradients(model_parts: Sequence[nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Find every gradient once, also of a parameter that two parts share."""
    seen = set()
    for part in model_parts:
        module = part.module if isinstance(part, DistributedDataParallel) else part
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter.grad


def _counts_here(gradient: Tensor, is_split: bool, mesh: Mesh) -> bool:
    """Tell whether no lower rank counts the same elements."""
    is_sharded = isinstance(gradient, DTensor) and any(
        placement.is_shard() for placement in gradient.placements
    )
    return (
        mesh.replica.rank == 0
        and (is_sharded or mesh.shard.rank == 0)
        and (is_split or mesh.tensor.rank == 0)
    )


def _sum_of_squares(gradients: list[Tensor], mesh: Mesh) -> Tensor:
    """Sum over this process and all others; norms of bf16 are taken in float32."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for same in _by_dtype(gradients):
        norms = torch._foreach_norm(
            same, 2, dtype=torch.promote_types(same[0].dtype, torch.float32)
        )
        total += torch.stack(norms).double().square_().sum()
    if mesh.world.size > 1:
        dist.all_reduce(total, group=mesh.world.group)
    return total


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())
