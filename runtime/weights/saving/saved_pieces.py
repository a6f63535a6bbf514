"""Turns what `save_pretrained` writes around: finds the tensors of a model in its files.

A tensor of a file may be a box of one of the model (an expert of a stack, a part of a fused
weight, under whatever name), or have its numbers in another order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.runtime.weights.saving.boxes_in_memory import is_whole, same_view
from autopar.runtime.weights.saving.saved_form import SavedForm, SavedTensor
from autopar.runtime.weights.saving.saving_ops import SavingOp, View

COPIES = {"alias", "clone", "detach", "_to_copy"}
JOINS = {"cat", "stack"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor in a file, and where its numbers lie in a tensor of the model."""

    name: str  # in the file
    shape: tuple[int, ...]
    viewed: tuple[int, ...]  # the sizes in which it is seen here
    start: tuple[int, ...]
    view: View  # of the model's tensor; it has the sizes of the box


def pieces_by_name(form: SavedForm) -> Mapping[str, tuple[Piece, ...]]:
    """Return the pieces of each tensor of a model that files have in whole."""
    names = {view.memory: name for name, view in form.sources.items()}
    taking, found = _Taking(form), defaultdict[str, list[Piece]](list)
    for tensor in form.tensors:
        for piece in taking.pieces(tensor):
            found[names[piece.view.memory]].append(piece)
    sizes = {name: math.prod(view.size) for name, view in form.sources.items()}
    return {name: own for name, one in found.items() if (own := _tiling(one, sizes[name]))}


def _tiling(pieces: Sequence[Piece], size: int) -> tuple[Piece, ...]:
    """Return pieces that are a tensor of so many elements together, one alone if that is whole."""
    whole = next((one for one in pieces if math.prod(one.view.size) == size), None)
    if whole is not None:
        return (whole,)
    return tuple(pieces) if sum(math.prod(one.view.size) for one in pieces) == size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A box of a tensor, and the view of a tensor of the model that it was taken from."""

    start: tuple[int, ...]
    view: View


class _Taking:
    """Follows tensors of files back to the tensors of the model that they were taken from."""

    def __init__(self, form: SavedForm) -> None:
        self._sources = {view.memory for view in form.sources.values()}
        self._ops = defaultdict[int, list[SavingOp]](list)
        for op in form.ops.ops:
            for memory in op.writes:
                self._ops[memory].append(op)

    def pieces(self, tensor: SavedTensor) -> Iterator[Piece]:
        """Yield the pieces of a tensor; of one that was computed in another way, none."""
        seen = tensor.view
        found = self._taken(seen)
        made = self._made(seen.memory)
        if not found and made is not None and is_whole(seen, made[1]):
            seen = made[1]  # which has been viewed in other sizes since
            found = self._taken(seen)
        for one in found:
            yield Piece(
                name=tensor.name,
                shape=tensor.view.size,
                viewed=seen.size,
                start=one.start,
                view=one.view,
            )

    def _taken(self, view: View) -> list[_Taken]:
        if view.memory in self._sources:
            return [_Taken(start=(0,) * len(view.size), view=view)]
        made = self._made(view.memory)
        if made is None:
            return []
        op, out = made
        kind, first = op.name, op.arguments[0]
        if kind in COPIES and isinstance(first, View) and first.size == out.size:
            inner = same_view(view, of=out, other=first)
            return [] if inner is None else self._taken(inner)
        if kind in JOINS and view == out:
            dim = op.arguments[1] if len(op.arguments) > 1 else 0
            parts = [_unsqueezed(one, dim) if kind == "stack" else one for one in first]
            return list(self._joined(parts, dim % len(out.size)))
        return []

    def _joined(self, parts: Sequence[View], dim: int) -> Iterator[_Taken]:
        """Yield where views that are laid side by side along a dim come from."""
        begin = 0
        for part in parts:
            for one in self._taken(part):
                start = (*one.start[:dim], one.start[dim] + begin, *one.start[dim + 1 :])
                yield replace(one, start=start)
            begin += part.size[dim]

    def _made(self, memory: int) -> tuple[SavingOp, View] | None:
        """Return the op that made a memory and its result, if nothing else has written to it."""
        ops = self._ops[memory]
        results = [one for op in ops for one in op.results if one.memory == memory]
        is_alone = len(ops) == len(results) == 1 and memory not in ops[0].reads
        return (ops[0], results[0]) if is_alone else None


def _unsqueezed(view: View, dim: int) -> View:
    """Return a view with one more dim, of one element."""
    dim %= len(view.size) + 1
    size = (*view.size[:dim], 1, *view.size[dim:])
    return replace(view, size=size, stride=(*view.stride[:dim], 0, *view.stride[dim:]))
