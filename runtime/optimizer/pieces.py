"""Turns a parameter into the piece of it that this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import HALF_DTYPES

_PIECES = "stepped_pieces"  # where an optimizer has what it steps in place of parameters


class Piece(Protocol):
    """What the optimizer steps in place of a parameter: a part of it, in fp32."""

    @property
    def parameter(self) -> nn.Parameter:
        """Whose piece it is."""

    @property
    def target(self) -> nn.Parameter:
        """What the optimizer sees: in the memory of `place`, or its fp32 copy."""

    @property
    def place(self) -> Tensor:
        """The parameter's own memory that this piece stands for, where it lies now."""

    def take_gradient(self) -> None:
        """Let the target see the parameter and its gradient, uncopied where the dtypes agree."""

    def slice(self, whole: Tensor) -> Tensor:
        """Return the piece's part of a tensor that is shaped like the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalPiece:
    """All that this rank holds of a parameter."""

    parameter: nn.Parameter
    target: nn.Parameter

    @property
    def place(self) -> Tensor:
        """The parameter's own memory that this piece stands for, where it lies now.

        Before the first forward fully_shard moves shards that are smaller than others, to pad them.
        """
        return local_tensor(self.parameter).detach()

    def take_gradient(self) -> None:
        """Let the target see the parameter and its gradient, uncopied where the dtypes agree."""
        place = self.place
        if place.dtype == self.target.dtype:
            self.target.data = place
        gradient = self.parameter.grad
        if gradient is None:
            self.target.grad = None
            return
        held = local_tensor(gradient)
        self.target.grad = held if held.dtype == self.target.dtype else held.to(self.target.dtype)

    def slice(self, whole: Tensor) -> Tensor:
        """Return the piece's part of a tensor that is shaped like the parameter."""
        return local_tensor(whole)


def note_pieces(optimizer: Optimizer, pieces: Sequence[Piece]) -> None:
    """Remember what an optimizer steps in place of parameters."""
    optimizer.__dict__[_PIECES] = tuple(pieces)


def pieces_of(optimizer: Optimizer) -> tuple[Piece, ...] | None:
    """Return what an optimizer steps in place of parameters; None where it steps these."""
    pieces: tuple[Piece, ...] | None = optimizer.__dict__.get(_PIECES)
    return pieces


def state_of(piece: Piece, value: Any) -> Any:
    """Return the piece's part of a state that the optimizer made when it was built."""
    if isinstance(value, Tensor) and value.shape == piece.parameter.shape and value.dim():
        return piece.slice(value).to(piece.target.dtype, copy=True)
    return value


def local_pieces(
    parameters: Iterable[nn.Parameter], masters: Mapping[int, Tensor]
) -> tuple[LocalPiece, ...]:
    """Return a piece per parameter: its local shard, or the fp32 master that its id has."""
    pieces = []
    for parameter in parameters:
        place = local_tensor(parameter.detach())
        if place.numel():
            master = masters.get(id(parameter))
            target = target_of(place, place) if master is None else nn.Parameter(master)
            pieces.append(LocalPiece(parameter=parameter, target=target))
    return tuple(pieces)


def target_of(place: Tensor, held: Tensor) -> nn.Parameter:
    """Return a parameter in the memory of a tensor, or where it is 16-bit an fp32 one of its own.

    `held` are the numbers of the latter, which may be more exact than those of the tensor.
    """
    is_half = place.dtype in HALF_DTYPES
    return nn.Parameter(held.to(torch.float32, copy=True) if is_half else place)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the plain tensor that this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
