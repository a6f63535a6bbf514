"""Turns the parameters of a bucket into a flat buffer of which each rank steps a part: ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.buckets import Bucket, Span, laid_out
from autopar.runtime.data_parallel.gradient_buckets import GradientBuckets
from autopar.runtime.optimizer.pieces import target_of
from autopar.runtime.ranks.transport import started_gather


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
