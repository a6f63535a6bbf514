"""Tells which box of a tensor a view of its memory is, and the same view of another tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.runtime.weights.saving.saving_ops import View

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A view that is a box of a tensor: where it begins, and the tensor's dim for each of its own.

    A dim of one element has none.
    """

    start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def overlap(self, ranges: Sequence[Range], size: tuple[int, ...]) -> list[Range]:
        """Return what ranges of the tensor's dims have in common with a box of that size."""
        sizes = dict(zip(self.dims, size, strict=True))
        return [
            (low := max(first, begin), max(low, min(last, begin + sizes.get(dim, 1))))
            for dim, (begin, (first, last)) in enumerate(zip(self.start, ranges, strict=True))
        ]


def box_of(view: View, tensor: View) -> Box | None:
    """Return the box of a tensor that a view of its memory is, or None if it is none."""
    start = [0] * len(tensor.size)
    offset = view.offset - tensor.offset
    for dim in sorted(range(len(start)), key=lambda one: -tensor.stride[one]):
        if tensor.size[dim] > 1:
            start[dim], offset = divmod(offset, tensor.stride[dim])
    dims = tuple(
        None if size == 1 else _dim_of(stride, tensor)
        for size, stride in zip(view.size, view.stride, strict=True)
    )
    taken = [dim for dim in dims if dim is not None]
    is_box = offset == 0 and len(set(taken)) == sum(size != 1 for size in view.size)
    sizes = {dim: size for dim, size in zip(dims, view.size, strict=True) if dim is not None}
    fits = all(
        begin >= 0 and begin + sizes.get(dim, 1) <= tensor.size[dim]
        for dim, begin in enumerate(start)
    )
    return Box(start=tuple(start), dims=dims) if is_box and fits else None


def _dim_of(stride: int, tensor: View) -> int | None:
    found = [d for d, own in enumerate(tensor.stride) if own == stride and tensor.size[d] > 1]
    return found[0] if len(found) == 1 else None


def same_view(view: View, of: View, other: View) -> View | None:
    """Return a view of another tensor of equal sizes that is what `view` is of a first one."""
    box = box_of(view, of)
    if box is None:
        return None
    offset = sum(begin * stride for begin, stride in zip(box.start, other.stride, strict=True))
    strides = tuple(0 if dim is None else other.stride[dim] for dim in box.dims)
    return replace(other, size=view.size, stride=strides, offset=other.offset + offset)


def is_whole(view: View, tensor: View) -> bool:
    """Whether a view has all of a tensor in its order, in whatever sizes."""
    return (
        view.offset == tensor.offset
        and math.prod(view.size) == math.prod(tensor.size)
        and view.stride == _contiguous(view.size)
        and tensor.stride == _contiguous(tensor.size)
    )


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of that size whose numbers lie row by row."""
    return tuple(max(math.prod(size[dim + 1 :]), 1) for dim in range(len(size)))
