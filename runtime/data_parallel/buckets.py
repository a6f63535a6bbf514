"""Gradients that travel together: buckets, and how they are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import ComingPart, ComingSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Over which ranks gradients are averaged, and who gets which part of the mean."""

    shard: Axis  # each of its ranks gets a part; of size 1: the whole
    replica: Axis  # its ranks get the same part
    wire_dtype: torch.dtype | None = None  # in which gradients travel, if not in their own

    @property
    def ranks(self) -> int:
        """How many ranks share the data."""
        return self.shard.size * self.replica.size

    @property
    def divides_first(self) -> bool:
        """Whether gradients are divided before they are summed: fp16 cannot hold large sums."""
        return self.shard.is_gloo or self.replica.is_gloo or self.wire_dtype is not None

    @property
    def operation(self) -> Any:
        """What the collectives do."""
        return dist.ReduceOp.SUM if self.divides_first else dist.ReduceOp.AVG


class ComingMean:
    """This rank's part of a flat tensor, which turns into the mean of every rank's."""

    def __init__(self, flat: Tensor, averaging: Averaging) -> None:
        self._flat = flat
        self._averaging = averaging
        self._wire = flat if averaging.wire_dtype is None else flat.to(averaging.wire_dtype)
        self._part = ComingPart(self._wire, averaging.shard, operation=averaging.operation)
        self._over_copies: ComingSum | None = None
        if averaging.shard.size == 1:
            self.sum_over_copies()

    def sum_over_copies(self) -> None:
        """Have the ranks that get the same part sum it, after waiting for it."""
        if self._over_copies is None:
            axis, operation = self._averaging.replica, self._averaging.operation
            self._over_copies = ComingSum(self._part.value(), axis, operation=operation)

    def value(self) -> Tensor:
        """Wait, and return the part in the memory of the flat tensor."""
        self.sum_over_copies()
        assert self._over_copies is not None
        part = self._over_copies.value()
        if self._wire is self._flat:
            return part
        shard = self._averaging.shard
        return self._flat.view(shard.size, -1)[shard.rank].copy_(part)


HALF_DTYPES = (torch.bfloat16, torch.float16)
FIRST_BUCKET_BYTES = 2**20  # small, as DDP's, so that messages start early in the backward
CACHED_BYTES = 2**20  # of a bucket that a second pass finds in the cache of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The elements of one parameter that lie in this rank's part of a bucket."""

    place: int  # of the parameter in the bucket
    start: int  # in the flattened parameter
    stop: int
    offset: int  # of the first of them in the bucket's buffer

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a tensor that is laid out as the bucket is."""
        return flat[self.offset : self.offset + self.stop - self.start]


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A flat buffer that several gradients are views of, and its reduction under way.

    Where the ranks of `shard` are several, each keeps the mean of its own part alone: then the
    parameters have no gradients after the reduction, and `held` gives what there is.
    """

    parameters: tuple[nn.Parameter, ...]
    shard: Axis
    spans: tuple[Span, ...] = field(init=False)
    buffer: Tensor | None = None  # made when the first gradient comes
    views: tuple[Tensor, ...] = ()
    missing: int = 0  # gradients still to come in this step
    coming: ComingMean | None = None
    _parts: dict[int, Tensor] = field(default_factory=dict)  # a view for each span, by its place
    _reached: frozenset[int] = frozenset()  # places whose gradients the part holds
    _earlier: Tensor | None = None  # the part of a reduction before, in the same step

    def __post_init__(self) -> None:
        """Find what this rank's part holds."""
        share = self.elements // self.shard.size
        self.spans = tuple(
            _spans(self.parameters, share * self.shard.rank, share * (self.shard.rank + 1))
        )

    @property
    def elements(self) -> int:
        """The elements of the buffer: the last part is filled up to the size of the others."""
        found = sum(parameter.numel() for parameter in self.parameters)
        return -(-found // self.shard.size) * self.shard.size

    @property
    def is_cut(self) -> bool:
        """Whether this rank keeps a part alone."""
        return self.shard.size > 1

    def allocate(self) -> Tensor:
        """Make the buffer, unless it is there, and return it."""
        if self.buffer is None:
            first = self.parameters[0]
            dtype = gradient_dtype(first)
            self.buffer = torch.zeros(self.elements, dtype=dtype, device=first.device)
            self.views = laid_out(self.buffer, self.parameters)
            self._parts = {span.place: span.of(self.buffer) for span in self.spans}
        return self.buffer

    def adopt(self, places: Sequence[int]) -> None:
        """Copy gradients into their places and let the parameters refer to them there."""
        self._make_room()
        views, gradients = [], []
        for place in places:
            parameter, view = self.parameters[place], self.views[place]
            if parameter.grad is None:
                view.zero_()  # the loss did not reach it, and what stands here is of another step
            elif parameter.grad is not view:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)

    def adopt_shares(self, ranks: int) -> None:
        """Divide all gradients by the number of ranks on their way into their places.

        One pass over the memory: a division by the collective is a second one, 2 % of a CPU step.
        What the cache holds takes two passes but few calls: 39 us against 95 us for 28 gradients.
        """
        self._make_room()
        buffer = self.allocate()
        if buffer.numel() * buffer.element_size() <= CACHED_BYTES:
            self.adopt(range(len(self.parameters)))
            buffer.mul_(1 / ranks)  # half the time of a division
            return
        here = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is view:
                here.append(view)
            else:
                torch.mul(parameter.grad, 1 / ranks, out=view)
                parameter.grad = view
        if here:
            torch._foreach_mul_(here, 1 / ranks)

    def let_go(self) -> None:
        """Take the gradients of a cut bucket from the parameters: they are about to be reduced."""
        if self.is_cut:
            here = (n for n, parameter in enumerate(self.parameters) if parameter.grad is not None)
            self._reached |= frozenset(here)
            for parameter in self.parameters:
                parameter.grad = None

    def settle(self) -> None:
        """Wait for the mean, and add what an earlier reduction of this step left."""
        assert self.coming is not None
        part = self.coming.value()
        self.coming = None
        if self._earlier is not None:
            part.add_(self._earlier)
            self._earlier = None

    def memory(self) -> list[Tensor]:
        """Return what this rank holds of all gradients, once they are reduced, as few tensors."""
        if self.buffer is None:
            return []
        if self.is_cut:
            return [own_part(self.buffer, self.shard)]
        gradients = [parameter.grad for parameter in self.parameters]
        if all(g is None or g is v for g, v in zip(gradients, self.views, strict=True)):
            return [self.buffer]
        return [gradient for gradient in gradients if gradient is not None]

    def held(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield what this rank holds of each gradient of a cut bucket, once it is reduced."""
        for span in self.spans:
            if span.place in self._reached:
                yield span, self._parts[span.place]

    def held_at(self, place: int) -> Tensor | None:
        """Return what this rank holds of one gradient, if the loss reached it."""
        return self._parts.get(place) if place in self._reached else None

    def made(self, place: int) -> Tensor:
        """Return the same, of a parameter that counts as reached from now on."""
        buffer = self.allocate()
        self._reached |= {place}
        return self._parts.get(place, buffer[:0])

    def forget(self) -> None:
        """Leave the part of a cut bucket to the next step."""
        self._reached, self._earlier = frozenset(), None

    def _make_room(self) -> None:
        """Set aside the part that is reduced already, where new gradients will lie."""
        self.allocate()
        if self._reached and self._earlier is None:
            assert self.buffer is not None
            self._earlier = own_part(self.buffer, self.shard).clone()


def buckets_of_size(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, shard: Axis
) -> Iterator[Bucket]:
    """Cut the parameters into runs of one dtype and at most `bucket_bytes`, or one parameter."""
    run: list[nn.Parameter] = []
    run_bytes = 0
    limit = min(bucket_bytes, FIRST_BUCKET_BYTES)
    for parameter in parameters:
        size = parameter.numel() * gradient_dtype(parameter).itemsize
        same = not run or _dtypes(run[0]) == _dtypes(parameter)
        if run and (not same or run_bytes + size > limit):
            yield Bucket(parameters=tuple(run), shard=shard)
            limit = bucket_bytes
            run, run_bytes = [], 0
        run.append(parameter)
        run_bytes += size
    if run:
        yield Bucket(parameters=tuple(run), shard=shard)


def own_part(flat: Tensor, shard: Axis) -> Tensor:
    """Return this rank's part of a flat tensor, in its memory."""
    return flat.view(shard.size, -1)[shard.rank]


def laid_out(flat: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """Return a view of a flat tensor for each parameter, in its shape, one behind the other."""
    sizes = [parameter.numel() for parameter in parameters]
    used = flat[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
    return tuple(one.view(p.shape) for one, p in zip(used, parameters, strict=True))


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def _dtypes(parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
    return parameter.dtype, gradient_dtype(parameter)


def _spans(parameters: Sequence[nn.Parameter], low: int, high: int) -> Iterator[Span]:
    """Yield what lies in low … high − 1 of parameters that are laid end to end."""
    offset = 0
    for place, parameter in enumerate(parameters):
        first, last = max(low, offset), min(high, offset + parameter.numel())
        if first < last:
            yield Span(place=place, start=first - offset, stop=last - offset, offset=first)
        offset += parameter.numel()
