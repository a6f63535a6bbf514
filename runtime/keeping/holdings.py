"""Turns the modules of this rank into the logical tensors that it holds parts of.

A logical tensor is one of the user's whole model, under the first of its names there; which part of
it is here follows from the plan. So what one plan has written another one can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.optimizer.pieces import Piece, local_tensor, pieces_of
from autopar.runtime.optimizer.sharded import FlatPiece
from autopar.runtime.tensor.chunks import Chunks, boxes, recorded_chunks, whole, with_rows
from autopar.runtime.tensor.shards import Place, group_aliases, places, whole_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What is here of a logical tensor, in the memory where the training has it."""

    key: str
    chunks: Chunks
    tensor: Tensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A parameter or buffer of a module, and what is here of it."""

    names: tuple[str, ...]  # in the whole model, the first of which stands for all
    place: Place
    chunks: Chunks

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return isinstance(self.place.tensor, nn.Parameter)

    @property
    def is_persistent(self) -> bool:
        """Whether it belongs to a state dict."""
        return self.place.attribute not in self.place.module._non_persistent_buffers_set


def named_tensors(parts: Iterable[nn.Module]) -> Iterator[Named]:
    """Yield every parameter and buffer once."""
    for part in parts:
        for group in group_aliases(places(part)):
            first = group[0]
            held = recorded_chunks(first.module, first.attribute)
            chunks = with_rows(held or whole(tuple(first.tensor.shape)), first.tensor)
            yield Named(names=whole_names(part, group), place=first, chunks=chunks)


class Stepped:
    """What an optimizer steps: pieces of the parameters that learn, or these themselves."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        pieces = pieces_of(optimizer) if optimizer is not None else None
        self._are_pieces = pieces is not None
        self._pieces: dict[int, list[Piece]] = {}
        for piece in pieces or ():
            self._pieces.setdefault(id(piece.parameter), []).append(piece)

    def pieces(self, tensor: Tensor) -> Sequence[Piece] | None:
        """Return the pieces of a parameter that are here, or None where it has none anywhere."""
        if not (self._are_pieces and tensor.requires_grad):
            return None
        return self._pieces.get(id(tensor), ())


def weights_held(parts: Iterable[nn.Module], optimizer: Optimizer | None) -> Iterator[Holding]:
    """Yield what is here of the weights: where the optimizer has them in fp32, that."""
    stepped = Stepped(optimizer)
    for one in named_tensors(parts):
        tensor, key = one.place.tensor, one.names[0]
        pieces = stepped.pieces(tensor)
        if pieces is None:
            local, is_buffer = local_tensor(tensor.detach()), not one.is_parameter
            yield Holding(key=key, chunks=one.chunks, tensor=local, is_buffer=is_buffer)
        for piece in pieces or ():
            yield from parts_of(piece, key, one.chunks, value_of(piece))


def value_of(piece: Piece) -> Tensor:
    """Return the values that an optimizer steps, where they lie now."""
    is_copy = piece.target.dtype != piece.place.dtype
    return piece.target.detach() if is_copy else piece.place


def parts_of(piece: Piece, key: str, chunks: Chunks, values: Tensor) -> Iterator[Holding]:
    """Yield values of a piece as boxes of the parameter, of which `chunks` are here."""
    if not isinstance(piece, FlatPiece):
        yield Holding(key=key, chunks=chunks, tensor=values)
        return
    first = 0
    for box in boxes(chunks.local_shape, piece.span.start, piece.span.stop):
        held = chunks.within_box(box)
        last = first + held.elements
        tensor = values.reshape(-1)[first:last].view(held.local_shape)
        yield Holding(key=key, chunks=held, tensor=tensor)
        first = last
