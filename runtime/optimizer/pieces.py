"""Parts of parameters in fp32, which optimizers step in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import HALF_DTYPES, Bucket, Span, laid_out
from autopar.runtime.data_parallel.gradient_buckets import GradientBuckets
from autopar.runtime.ranks.transport import started_gather

_PIECES = "stepped_pieces"  # where an optimizer has what it steps in place of parameters


class ParameterPiece(Protocol):
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


def note_pieces(optimizer: Optimizer, pieces: Sequence[ParameterPiece]) -> None:
    """Remember what an optimizer steps in place of parameters."""
    optimizer.__dict__[_PIECES] = tuple(pieces)


def pieces_of(optimizer: Optimizer) -> tuple[ParameterPiece, ...] | None:
    """Return what an optimizer steps in place of parameters; None where it steps these."""
    pieces: tuple[ParameterPiece, ...] | None = optimizer.__dict__.get(_PIECES)
    return pieces


def state_of(piece: ParameterPiece, value: Any) -> Any:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatPiece:
    """The elements of one parameter in this rank's part of a bucket."""

    parameter: nn.Parameter
    target: nn.Parameter
    place: Tensor
    bucket: Bucket
    span: Span

    def take_gradient(self) -> None:
        """Let the target see its gradient, which has its dtype."""
        self.target.grad = self.bucket.held_at(self.span.place)

    def slice(self, whole: Tensor) -> Tensor:
        """Return the piece's part of a tensor that is shaped like the parameter."""
        return whole.reshape(-1)[self.span.start : self.span.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """The parameters of a bucket, laid out as their gradients are, and what this rank steps."""

    bucket: Bucket
    buffer: Tensor
    pieces: tuple[FlatPiece, ...]


def shard_parameters_flat(buckets: GradientBuckets) -> tuple[FlatShard, ...]:
    """Move the parameters of every bucket into a flat buffer, cut as their gradients are.

    The cut goes through parameters, so every rank holds the same share of the states to the
    element; optimizers that work element by element do not notice.
    """
    return tuple(_flat_shard(bucket, buckets.half) for bucket in buckets.buckets)


def gather_parameters(shards: Iterable[FlatShard]) -> None:
    """Bring every rank's new values to all ranks."""
    works = [started_gather(s.buffer, s.bucket.shard) for s in shards]
    for work in filter(None, works):
        work.wait()


def forget_gradients(shards: Iterable[FlatShard]) -> None:
    """Leave the gradients' memory to the next step."""
    for shard in shards:
        shard.bucket.forget()


def _flat_shard(bucket: Bucket, half: torch.dtype | None) -> FlatShard:
    """Lay the parameters of a bucket end to end, in 16 bits where the module computes in these."""
    first = bucket.parameters[0]
    buffer = torch.zeros(bucket.elements, dtype=half or first.dtype, device=first.device)
    spans = {span.place: span for span in bucket.spans}
    pieces = []
    views = laid_out(buffer, bucket.parameters)
    for number, (parameter, view) in enumerate(zip(bucket.parameters, views, strict=True)):
        held = parameter.detach()
        view.copy_(held)
        parameter.data = view
        if number in spans:
            span = spans[number]
            place = span.of(buffer)
            target = target_of(place, held.reshape(-1)[span.start : span.stop])
            pieces.append(
                FlatPiece(parameter=parameter, target=target, place=place, bucket=bucket, span=span)
            )
    return FlatShard(bucket=bucket, buffer=buffer, pieces=tuple(pieces))
