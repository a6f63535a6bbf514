"""Says how a dim is cut along one of its axes: whether it can be, and in which blocks."""

from __future__ import annotations

from math import prod

from autopar.planner.extent import Extent
from autopar.planner.rules.terms import Concat, Dim, Leaf, Product, leaves, size_of

Parts = tuple[tuple[int, int], ...]


def has_axis(dim: Dim, axis: str) -> bool:
    """Whether an axis occurs in a dim."""
    return any(leaf.name == axis for leaf in leaves(dim))


def is_cuttable(dim: Dim, axis: str) -> bool:
    """Whether keeping some positions of the axis keeps a part of the dim: once in each part."""
    if isinstance(dim, Leaf):
        return dim.name == axis
    if isinstance(dim, Concat):
        return all(is_cuttable(part, axis) for part in dim.parts)
    holders = [factor for factor in dim.factors if has_axis(factor, axis)]
    return len(holders) == 1 and is_cuttable(holders[0], axis)


def is_contiguous(dim: Dim, axis: str, batch: int) -> bool:
    """Whether a shard is one block of each part: nothing but ones lies outside the axis."""
    if isinstance(dim, Leaf):
        return dim.name == axis
    if isinstance(dim, Concat):
        return all(is_contiguous(part, axis, batch) for part in dim.parts)
    larger = [factor for factor in dim.factors if size_of(factor).at(batch) != 1]
    return bool(larger) and is_contiguous(larger[0], axis, batch)


def axis_size(dim: Dim, axis: str) -> Extent:
    """Return the number of positions of an axis that occurs in a dim."""
    return next(leaf.size for leaf in leaves(dim) if leaf.name == axis)


def parts_of(dim: Dim, axis: str, batch: int) -> Parts:
    """Return how a dim is cut along an axis: parts laid end to end, each (blocks, block size).

    Every part has as many blocks as the axis has positions, so all are cut at the same ones.
    """
    if isinstance(dim, Leaf):
        assert dim.name == axis, f"{axis} does not occur in every part of the dim"
        return ((dim.size.at(batch), 1),)
    if isinstance(dim, Concat):
        return tuple(part for inner in dim.parts for part in parts_of(inner, axis, batch))
    return _product_parts(dim, axis, batch)


def _product_parts(dim: Product, axis: str, batch: int) -> Parts:
    """What lies outside the axis repeats its parts; what lies inside makes their blocks larger."""
    place = next(i for i, factor in enumerate(dim.factors) if has_axis(factor, axis))
    sizes = [size_of(factor).at(batch) for factor in dim.factors]
    own = parts_of(dim.factors[place], axis, batch)
    inside = prod(sizes[place + 1 :])
    return tuple((count, unit * inside) for count, unit in own) * prod(sizes[:place])
