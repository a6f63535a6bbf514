"""Finds along which axes the letters of one op may be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.planner.axes.infer import Axes
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.programs.layouts.cuts import axis_size, is_cuttable
from autopar.planner.rules.signature import Dims
from autopar.planner.rules.terms import Concat, Dim, Leaf, leaves, substituted


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Letters that are split together along an axis that lies in all of them.

    They are one letter, or those whose concatenation is a dim (the parts of a chunk).
    """

    letters: tuple[str, ...]
    axis: str

    @property
    def letter(self) -> str:
        """The first letter, by which the strategy goes."""
        return self.letters[0]

    def includes(self, dim: Dim | None) -> bool:
        """Whether one of the letters occurs in a dim of the signature."""
        return dim is not None and any(leaf.name in self.letters for leaf in leaves(dim))


def candidates(op: Op, graph: Graph, axes: Axes, *, degree: int, batch: int) -> Iterator[Candidate]:
    """Yield what the rule of an op and the dims of its tensors allow to split."""
    own = axes.ops[op.name]
    places = (*own.signature.operands, *own.signature.results)
    for group in _groups(places):
        if own.signature.whole.intersection(group) or not all(x in own.letters for x in group):
            continue
        for axis in dict.fromkeys(leaf.name for leaf in leaves(own.letters[group[0]])):
            size = axis_size(own.letters[group[0]], axis).at(graph.fixed_batch or batch)
            candidate = Candidate(letters=group, axis=axis)
            if size >= degree and _fits(candidate, places, axes, op):
                yield candidate


def occurrences(
    names: Sequence[str], places: Sequence[tuple[str, Dims]], candidate: Candidate
) -> list[int | None]:
    """Return for each tensor the dim that has the letters; None where it has none of them.

    A tensor that stands twice in the op stands twice in its signature, in the same order.
    """
    rest = list(places)
    found: list[int | None] = []
    for name in names:
        own = next((place for place in rest if place[0] == name), None)
        if own is not None:
            rest.remove(own)
        dims = own[1] if own is not None else ()
        found.append(next((i for i, dim in enumerate(dims) if candidate.includes(dim)), None))
    return found


def _groups(places: Sequence[tuple[str, Dims]]) -> list[tuple[str, ...]]:
    """Return the letters; those that are laid end to end somewhere belong together."""
    groups: dict[str, tuple[str, ...]] = {}
    for _, dims in places:
        for dim in dims:
            for leaf in leaves(dim):
                groups.setdefault(leaf.name, (leaf.name,))
            for joined in _concatenated(dim):
                merged = tuple(dict.fromkeys(x for name in joined for x in groups[name]))
                groups.update(dict.fromkeys(merged, merged))
    return list(dict.fromkeys(groups.values()))


def _concatenated(dim: Dim) -> Iterator[tuple[str, ...]]:
    if isinstance(dim, Concat):
        yield tuple(leaf.name for leaf in leaves(dim))
    elif not isinstance(dim, Leaf):
        for factor in dim.factors:
            yield from _concatenated(factor)


def _fits(candidate: Candidate, places: Sequence[tuple[str, Dims]], axes: Axes, op: Op) -> bool:
    """Whether each tensor has the letters in one dim at most, and the axis cuts that dim."""
    letters = axes.ops[op.name].letters
    for name, dims in places:
        touched = [i for i, dim in enumerate(dims) if candidate.includes(dim)]
        if len(touched) > 1:
            return False
        for i in touched:
            dim = axes.dims[name][i]
            meant = substituted(dims[i], lambda leaf: letters.get(leaf.name, leaf))
            # where inference found a conflict, the dim is not what the letters say
            if not is_cuttable(dim, candidate.axis) or list(leaves(meant)) != list(leaves(dim)):
                return False
    return True
