"""Turns a parameter into the piece of it that this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.gradient_buckets import HALF_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """What the optimizer steps in place of a parameter: a part of it, in fp32."""

    parameter: nn.Parameter
    target: nn.Parameter  # what the optimizer sees: in the memory of `place`, or its fp32 copy
    start: int | None = None  # where in the flattened parameter the piece lies; None: all of it
    stop: int | None = None

    @property
    def place(self) -> Tensor:
        """The parameter's own memory that this piece stands for, where it lies now.

        Before the first forward fully_shard moves shards that are smaller than others, to pad them.
        """
        return self.slice(local_tensor(self.parameter).detach())

    def take_gradient(self) -> None:
        """Let the target see the parameter and its gradient, uncopied where the dtypes agree."""
        place = self.place
        if place.dtype == self.target.dtype:
            self.target.data = place
        gradient = self.parameter.grad
        if gradient is None:
            self.target.grad = None
            return
        local = self.slice(local_tensor(gradient))
        self.target.grad = (
            local if local.dtype == self.target.dtype else local.to(self.target.dtype)
        )

    def slice(self, whole: Tensor) -> Tensor:
        """Return the piece's part of a tensor that is shaped like the parameter."""
        if self.start is None:
            return whole
        return whole.reshape(-1)[self.start : self.stop]

    def of_state(self, value: Any) -> Any:
        """Return the piece's part of a state that the optimizer made when it was built."""
        if isinstance(value, Tensor) and value.shape == self.parameter.shape and value.dim():
            return self.slice(local_tensor(value)).to(self.target.dtype, copy=True)
        return value


def local_pieces(parameters: Iterable[nn.Parameter]) -> tuple[Piece, ...]:
    """Return a piece per parameter: its local shard, as an fp32 master where it is 16-bit."""
    pieces = []
    for parameter in parameters:
        place = local_tensor(parameter.detach())
        if place.numel():
            pieces.append(Piece(parameter=parameter, target=target_of(place)))
    return tuple(pieces)


def target_of(place: Tensor) -> nn.Parameter:
    """Return a parameter in the memory of a tensor, or an fp32 copy of it where it is 16-bit."""
    return nn.Parameter(place.float() if place.dtype in HALF_DTYPES else place)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the plain tensor that this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
