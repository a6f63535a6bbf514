"""Turns pieces of a tensor, which lie in tensors of files, into slices of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.weights.filling import ShapeError
from autopar.runtime.weights.saving.boxes_in_memory import Box, Range, box_of
from autopar.runtime.weights.saving.saved_pieces import Piece
from autopar.runtime.weights.saving.saving_ops import View


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A piece, and the tensor of a file that it is in, of which slices are read."""

    piece: Piece
    stored: Any

    def box(self, tensor: View) -> Box | None:
        """Return where it lies in the model's tensor, or None if its numbers lie otherwise."""
        is_as_stored = self.piece.viewed == self.piece.shape
        return box_of(self.piece.view, tensor) if is_as_stored else None

    def read(self) -> Tensor:
        """Read all of it."""
        piece = self.piece
        whole: Tensor = self.stored[...]
        ends = zip(piece.start, piece.view.size, strict=True)
        return whole.reshape(piece.viewed)[tuple(slice(at, at + size) for at, size in ends)]

    def read_part(self, common: Sequence[Range], box: Box) -> Tensor:
        """Read what a box of the model's tensor has of it, with the dims of that."""
        slices, order = [], []
        for start, dim in zip(self.piece.start, box.dims, strict=True):
            low, high = (0, 1) if dim is None else common[dim]
            begin = start if dim is None else start - box.start[dim]
            slices.append(slice(begin + low, begin + high))
            order += [] if dim is None else [dim]
        part: Tensor = self.stored[tuple(slices) if slices else ...]
        sizes = [high - low for low, high in common]
        part = part.reshape([sizes[dim] for dim in order])
        places = sorted(range(len(order)), key=order.__getitem__)
        return part.permute(places).reshape(sizes)


@dataclass(frozen=True, kw_only=True)
class PiecedTensor:
    """A tensor of the model, read from its pieces.

    Of each piece only that is read which a slice has of it. If the numbers of a piece lie in
    another order, the whole tensor is put together first.
    """

    tensor: View
    pieces: tuple[StoredPiece, ...]

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor; raise where a file's is none that belongs to it."""
        for one in self.pieces:
            found, wanted = tuple(one.stored.get_shape()), one.piece.shape
            if found != wanted:
                raise ShapeError(f"{one.piece.name} is {wanted} here and {found} in its source")
        return list(self.tensor.size)

    def __getitem__(self, index: Any) -> Tensor:
        boxes = [box for one in self.pieces if (box := one.box(self.tensor)) is not None]
        if len(boxes) < len(self.pieces):
            return self._whole[index]
        given = index if isinstance(index, tuple) else ()
        slices = (*given, *[slice(None)] * (len(self.tensor.size) - len(given)))
        wanted = [one.indices(size)[:2] for one, size in zip(slices, self.tensor.size, strict=True)]
        found: Tensor | None = None
        for one, box in zip(self.pieces, boxes, strict=True):
            common = box.overlap(wanted, one.piece.view.size)
            if any(low >= high for low, high in common):
                continue
            part = one.read_part(common, box)
            if found is None:
                found = part.new_empty([last - first for first, last in wanted])
            place = zip(common, wanted, strict=True)
            found[tuple(slice(low - at, high - at) for (low, high), (at, _) in place)] = part
        return torch.empty([last - first for first, last in wanted]) if found is None else found

    @cached_property
    def _whole(self) -> Tensor:
        parts = [one.read() for one in self.pieces]
        whole = torch.empty_strided(self.tensor.size, self.tensor.stride, dtype=parts[0].dtype)
        for one, part in zip(self.pieces, parts, strict=True):
            view = one.piece.view
            whole.as_strided(view.size, view.stride, view.offset).copy_(part)
        return whole
