"""Converts a tensor between two layouts on an axis, forward and backward.

    I   same value on every rank; its gradient is whole on every rank
    R   same value on every rank; its gradient is a partial sum on each rank
    S   split along a dim; so is its gradient
    P   the ranks' values add up to the true value; its gradient is whole on every rank

    function       layouts  forward                   backward              known as
    sum_gradients  I → R    nothing                   all-reduce            Megatron's f
    sum_partials   P → I    all-reduce                nothing               Megatron's g
    sum_both       P → R    all-reduce                all-reduce
    scatter_sum    P → S    reduce-scatter            all-gather            to sequence parallel
    gather         S → R    all-gather                reduce-scatter        from sequence parallel
    gather_whole   S → I    all-gather                slice
    take_shard     I → S    slice                     all-gather
    take_own       R → S    slice                     zero-pad
    exchange       S → S'   all-to-all                all-to-all            Ulysses
    place_own      S → P    zero-pad                  slice
    first_only     I → P    x on rank 0, zeros else   nothing
    first_whole    R → P    x on rank 0, zeros else   the same mask
    first_gradient R → I    nothing                   gradient on rank 0, zeros else

`parts` says how a dim is cut (see slices.py); by default it is one part with blocks of one element.
To gather a dim without `parts`, slices.py looks for its whole length among those that this forward
has cut or the stage has received: one of which this rank's share is as long as x. If there is none,
all ranks are assumed to hold equally many elements.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from autopar.runtime.ranks.mesh import DRY_RUN, Axis
from autopar.runtime.ranks.transport import summed
from autopar.runtime.tensor.slices import (
    Cut,
    Parts,
    cut,
    cut_of_share,
    exchange_along,
    gather_along,
    note_length,
    pad_along,
    slice_along,
    sum_scatter_along,
)

__all__ = [
    "exchange",
    "first_gradient",
    "first_only",
    "first_whole",
    "gather",
    "gather_whole",
    "place_own",
    "scatter_sum",
    "sum_both",
    "sum_gradients",
    "sum_partials",
    "take_own",
    "take_shard",
]

_Function = Callable[..., Tensor]
Whole = Callable[[Tensor, Axis], Tensor]
Along = Callable[[Tensor, int, Cut, Axis], Tensor]


def sum_gradients(x: Tensor, axis: Axis) -> Tensor:
    """I → R: let each rank use the whole value for its share of the work."""
    return _convert(x, axis, _unchanged, summed)


def sum_partials(x: Tensor, axis: Axis) -> Tensor:
    """P → I: sum the ranks' partial values."""
    return _convert(x, axis, summed, _unchanged)


def sum_both(x: Tensor, axis: Axis) -> Tensor:
    """P → R: sum the ranks' partial values, for further work that ranks share."""
    return _convert(x, axis, summed, summed)


def first_only(x: Tensor, axis: Axis) -> Tensor:
    """I → P: count a whole value once among partial values."""
    return _convert(x, axis, _on_first, _unchanged)


def first_whole(x: Tensor, axis: Axis) -> Tensor:
    """R → P: keep a whole value, and later its gradient, on the first rank alone."""
    return _convert(x, axis, _on_first, _on_first)


def first_gradient(x: Tensor, axis: Axis) -> Tensor:
    """R → I: count a whole gradient once among partial gradients."""
    return _convert(x, axis, _unchanged, _on_first)


def scatter_sum(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """P → S: sum the ranks' partial values, and keep this rank's slice."""
    shares = _cut_whole(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, sum_scatter_along, gather_along)


def gather(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """S → R: concatenate the slices, for work that ranks share."""
    shares = _cut_local(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, gather_along, sum_scatter_along)


def gather_whole(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """S → I: concatenate the slices, for the same work on every rank."""
    shares = _cut_local(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, gather_along, slice_along)


def take_shard(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """I → S: keep this rank's slice of a whole value."""
    shares = _cut_whole(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, slice_along, gather_along)


def take_own(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """R → S: keep this rank's slice; the gradient of the rest comes from other ranks."""
    shares = _cut_whole(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, slice_along, pad_along)


def place_own(x: Tensor, dim: int, axis: Axis, parts: Parts | None = None) -> Tensor:
    """S → P: put this rank's slice in its place among zeros."""
    shares = _cut_local(x, dim, axis, parts)
    return _convert_along(x, dim, axis, shares, pad_along, slice_along)


def exchange(
    x: Tensor,
    gather_dim: int,
    split_dim: int,
    axis: Axis,
    gather_parts: Parts | None = None,
    split_parts: Parts | None = None,
) -> Tensor:
    """S(gather_dim) → S(split_dim): make one dim whole and cut the other."""
    if axis.size == 1:
        return x
    gathered_cut = _cut_local(x, gather_dim, axis, gather_parts)
    split_cut = _cut_whole(x, split_dim, axis, split_parts)
    gather_dim, split_dim = gather_dim % x.ndim, split_dim % x.ndim
    there = (gather_dim, split_dim, gathered_cut, split_cut, axis)
    back = (split_dim, gather_dim, split_cut, gathered_cut, axis)
    return _converted(x, exchange_along, there, exchange_along, back)


def fuse_with_products(axis: Axis) -> None:
    """Let inductor send gathers and sums along dims piece by piece, while products are computed.

    torch has ops for this for GPUs of one node, which read each other's memory. On CPUs and in a
    dry run nothing changes.
    """
    if axis.group is None or not torch.cuda.is_available() or DRY_RUN in os.environ:
        return
    with warnings.catch_warnings():  # torch deprecates this call, and its pass still asks for it
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(axis.group.group_name)
    torch._inductor.config._micro_pipeline_tp = True


def _convert(x: Tensor, axis: Axis, forward: Whole, backward: Whole) -> Tensor:
    return x if axis.size == 1 else _converted(x, forward, (axis,), backward, (axis,))


def _convert_along(
    x: Tensor, dim: int, axis: Axis, shares: Cut, forward: Along, backward: Along
) -> Tensor:
    if axis.size == 1:
        return x
    arguments = (dim % x.ndim, shares, axis)
    return _converted(x, forward, arguments, backward, arguments)


def _converted(x: Tensor, *functions: Any) -> Tensor:
    converted: Tensor = _Conversion.apply(x, *functions)  # type: ignore[no-untyped-call]
    return converted


def _cut_whole(x: Tensor, dim: int, axis: Axis, parts: Parts | None) -> Cut:
    """Return the cut of a dim that is whole on this rank."""
    shares = cut(((x.shape[dim], 1),) if parts is None else parts, axis.size)
    if parts is None:
        note_length(x.shape[dim])
    if shares.whole != x.shape[dim]:
        raise ValueError(
            f"dim {dim} has {x.shape[dim]} elements, but its parts {parts} add up to {shares.whole}"
        )
    return shares


def _cut_local(x: Tensor, dim: int, axis: Axis, parts: Parts | None) -> Cut:
    """Return the cut of a dim of which this rank holds a slice."""
    local = x.shape[dim]
    shares = cut_of_share(local, axis, x.device) if parts is None else cut(parts, axis.size)
    if shares.sizes[axis.rank] != local:
        expected = shares.sizes[axis.rank]
        raise ValueError(
            f"dim {dim} has {local} elements, but rank {axis.rank}'s share is {expected}"
        )
    return shares


def _unchanged(x: Tensor, _: Axis) -> Tensor:
    return x.view_as(x)


def _on_first(x: Tensor, axis: Axis) -> Tensor:
    """Return x on rank 0 and zeros elsewhere (not x · 0, which would turn inf into nan)."""
    return x.view_as(x) if axis.rank == 0 else torch.zeros_like(x)


class _Conversion(torch.autograd.Function):
    """A function of a tensor, and the function of its gradient, each with further arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        there: _Function,
        given: tuple[Any, ...],
        back: _Function,
        returned: Any,
    ) -> Tensor:
        ctx.back, ctx.returned = back, returned
        return there(x, *given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0], *ctx.returned), None, None, None, None
