"""Buckets of gradients, and their averaging over data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.averaging import (
    Averaging,
    ComingCompressed,
    ComingMean,
    Compressor,
    Feedback,
)
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.transport import HostLink, HostPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a ZeRO level divides parameters, gradients and optimizer states over `Mesh.shard`.

    Modules are sharded by `fully_shard`. Without it gradients are averaged in buckets.
    """

    shards_modules: bool = False
    # a ZeRO unit's parameters are freed after its forward, and gathered again by its backward
    frees_after_forward: bool = False
    steps_parts: bool = False  # each rank gets its part of every bucket, and its optimizer steps it

    @property
    def gathers_once(self) -> bool:
        """Whether parameters stay gathered from a step's first forward to its last backward."""
        return self.shards_modules and not self.frees_after_forward


LEVELS: Mapping[int, Sharding] = {
    0: Sharding(),
    1: Sharding(steps_parts=True),
    2: Sharding(shards_modules=True),
    3: Sharding(shards_modules=True, frees_after_forward=True),
}


def sharding_of(zero: int) -> Sharding:
    """Return what a ZeRO level divides, or raise if there is no such level."""
    if zero not in LEVELS:
        raise RuntimeError(f"there is no ZeRO level {zero!r}: take one of {list(LEVELS)}")
    return LEVELS[zero]


def averaging_of(mesh: Mesh, sharding: Sharding, wire_dtype: torch.dtype | None) -> Averaging:
    """Return how buckets are averaged over the data axis, or over a replica's part of it."""
    if sharding.steps_parts:
        replica = ALONE if mesh.sync_every else mesh.replica
        return Averaging(shard=mesh.shard, replica=replica, wire_dtype=wire_dtype)
    return Averaging(shard=ALONE, replica=mesh.averaging, wire_dtype=wire_dtype)


MEAN = "mean"  # in place of a rank's number, for the errors of the mean
HALF_DTYPES = (torch.bfloat16, torch.float16)
FIRST_BUCKET_BYTES = 2**20  # small, as DDP's, so that messages start early in the backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The elements of one parameter that lie in this rank's part of a bucket."""

    place: int  # index of the parameter in the bucket
    start: int  # in the flattened parameter
    stop: int
    offset: int  # of the first element in the bucket's buffer

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """Return a view of these elements; `flat` holds the bucket's elements from `first` on."""
        offset = self.offset - first
        return flat[offset : offset + self.stop - self.start]


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A flat buffer, of which several gradients are views, and its reduction.

    If `averaging.shard` has several ranks, each keeps the mean of its own part only. With a `link`,
    this part goes to the host's memory, and the buffer is freed. In both cases the parameters have
    no gradients after the reduction; `reduced_parts` yields this rank's parts of the means.
    """

    parameters: tuple[nn.Parameter, ...]
    averaging: Averaging
    link: HostLink | None = None
    compressor: Compressor | None = None
    feedback: Feedback = field(default_factory=Feedback)  # the errors of the compressor
    spans: tuple[Span, ...] = field(init=False)
    buffer: Tensor | None = None  # allocated when the first gradient arrives
    views: tuple[Tensor, ...] = ()
    missing: int = 0  # gradients still to come in this step
    coming: ComingMean | ComingCompressed | None = None
    # a view for each span, by the parameter's index
    _parts: dict[int, Tensor] = field(default_factory=dict)
    _reached: frozenset[int] = frozenset()  # indices of parameters that have a reduced gradient
    _earlier: Tensor | None = None  # the part from an earlier reduction of the same step
    _home: HostPart | None = None

    def __post_init__(self) -> None:
        """Find the spans in this rank's part."""
        share = self.elements // self.shard.size
        low, high = share * self.shard.rank, share * (self.shard.rank + 1)
        self.spans = tuple(self.spans_within(low, high))

    @property
    def align(self) -> int:
        """Each parameter begins at a multiple of this many elements."""
        return 1 if self.compressor is None else self.compressor.align

    @property
    def shard(self) -> Axis:
        """The ranks that each keep a part of the mean."""
        return self.averaging.shard

    @property
    def elements(self) -> int:
        """The elements of the buffer, padded so that all parts have the same size.

        With compression, each part also divides into equal pieces, one for each copy.
        """
        copies = 1 if self.compressor is None else self.averaging.replica.size
        found = sum(map(self._room, self.parameters))
        return _up(found, self.shard.size * copies * self.align)

    def _room(self, parameter: nn.Parameter) -> int:
        return _up(parameter.numel(), self.align)

    @property
    def is_apart(self) -> bool:
        """Whether the parameters have no .grad: the mean is divided over ranks, or on the host."""
        return self.shard.size > 1 or self.link is not None

    @property
    def home(self) -> HostPart | None:
        """This rank's part of the mean in the host's memory; None without a `link`."""
        if self.link is not None and self._home is None:
            dtype = gradient_dtype(self.parameters[0])
            self._home = HostPart(self.link, self.elements // self.shard.size, dtype)
            low = self.shard.rank * self.elements // self.shard.size
            self._parts = {one.place: one.of(self._home.memory, low) for one in self.spans}
        return self._home

    def allocate(self) -> Tensor:
        """Allocate the buffer if it does not exist yet, and return it."""
        if self.buffer is None:
            first = self.parameters[0]
            dtype = gradient_dtype(first)
            self.buffer = torch.zeros(self.elements, dtype=dtype, device=first.device)
            self.views = self.laid_out(self.buffer)
            if self.link is None:
                self._parts = {span.place: span.of(self.buffer) for span in self.spans}
        return self.buffer

    def adopt(self, places: Sequence[int]) -> None:
        """Copy gradients into the buffer, and point the parameters' .grad to the copies."""
        self._make_room()
        views, gradients = [], []
        for place in places:
            parameter, view = self.parameters[place], self.views[place]
            if parameter.grad is None:
                view.zero_()  # without a gradient in this step; the buffer still holds an older one
            elif parameter.grad is not view:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)

    def reduce(self) -> None:
        """Copy all gradients into the buffer, and start their reduction."""
        self._take_over()
        self.adopt(range(len(self.parameters)))
        buffer = self.allocate()
        averaging, compressor = self.averaging, self.compressor
        if averaging.divides_first or compressor is not None:
            buffer.mul_(1 / averaging.ranks)
        self.drop_gradients()
        if compressor is None:
            self.coming = ComingMean(buffer, averaging)
        else:
            self.coming = compressor.started(buffer, self.views, averaging, self.feedback)

    def _take_over(self) -> None:
        """With a `link`, use the gradient of a bucket's only parameter as the bucket's buffer."""
        gradient = self.parameters[0].grad
        if self.link is None or gradient is None or self.buffer is not None:
            return
        if gradient.numel() == self.elements and gradient.is_contiguous():
            self.buffer, self.views = gradient.view(-1), (gradient,)

    def drop_gradients(self) -> None:
        """Drop the parameters' .grad when their reduction begins, if the mean lies elsewhere."""
        if self.is_apart:
            here = (n for n, parameter in enumerate(self.parameters) if parameter.grad is not None)
            self._reached |= frozenset(here)
            for parameter in self.parameters:
                parameter.grad = None

    def settle(self) -> None:
        """Wait for the mean; move it to the host, or add the part of an earlier reduction to it.

        A step has several reductions if gradients are reduced in every backward.
        """
        assert self.coming is not None
        part = self.coming.value()
        self.coming = None
        if self.home is not None:
            self.home.take(part)
            self.buffer, self.views = None, ()
        if self._earlier is not None:
            part.add_(self._earlier)
            self._earlier = None

    def allocated(self) -> list[Tensor]:
        """Return the bucket's buffer, if it exists now."""
        return [] if self.buffer is None else [self.buffer]

    def memory(self) -> list[Tensor]:
        """Return this rank's part of all reduced gradients, in few tensors."""
        if self.home is not None:
            return [self.home.value()] if self._reached else []
        if self.buffer is None:
            return []
        if self.is_apart:
            return [own_part(self.buffer, self.shard)]
        gradients = [parameter.grad for parameter in self.parameters]
        if all(g is None or g is v for g, v in zip(gradients, self.views, strict=True)):
            return [self.buffer]
        return [gradient for gradient in gradients if gradient is not None]

    def reduced_parts(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield this rank's part of each reduced gradient, if the bucket `is_apart`."""
        self._await()
        for span in self.spans:
            if span.place in self._reached:
                yield span, self._parts[span.place]

    def reduced_part(self, place: int) -> Tensor | None:
        """Return this rank's part of one gradient, or None if the loss did not reach it."""
        self._await()
        return self._parts.get(place) if place in self._reached else None

    def made(self, place: int) -> Tensor:
        """Return this rank's part of one gradient, zeros if the loss did not reach it."""
        if self.home is not None:
            memory = self.home.value() if self._reached else self.home.memory.zero_()
        else:
            memory = self.allocate()
        self._reached |= {place}
        return self._parts.get(place, memory[:0])

    def forget(self) -> None:
        """Forget the reduced part before the next step."""
        self._reached, self._earlier = frozenset(), None
        if self._home is not None:
            self._home.forget()

    def laid_out(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return a view of a flat tensor for each parameter, in its shape, one after the other."""
        rooms = [self._room(parameter) for parameter in self.parameters]
        used = flat[: sum(rooms)].split(rooms)  # type: ignore[no-untyped-call]
        pairs = zip(used, self.parameters, strict=True)
        return tuple(one[: parameter.numel()].view(parameter.shape) for one, parameter in pairs)

    def spans_within(self, low: int, high: int) -> Iterator[Span]:
        """Yield the spans of elements low … high − 1 of a tensor laid out like the buffer."""
        offset = 0
        for place, parameter in enumerate(self.parameters):
            first, last = max(low, offset), min(high, offset + parameter.numel())
            if first < last:
                yield Span(place=place, start=first - offset, stop=last - offset, offset=first)
            offset += self._room(parameter)

    def errors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the errors of compression on this rank: (rank's number or MEAN, elements, index).

        The index is that of the first of these elements in the bucket.
        """
        if self.compressor is None:
            return
        own, mean = self.feedback.own, self.feedback.mean
        if own is None:
            return
        number, _ = self.compressor.error_rank(self.averaging)
        is_part = own.numel() < self.elements
        first = is_part * self.shard.rank * self.elements // self.shard.size
        yield str(number), own, first
        if mean is not None:
            yield MEAN, mean, first + number * mean.numel()

    def allocate_errors(self) -> int:
        """Allocate `feedback` before the first step; return the number of ranks that have one."""
        if self.compressor is None:
            return 0
        first = self.parameters[0]
        own, mean = self.compressor.error_sizes(self.elements, self.averaging)
        zeros = partial(torch.zeros, dtype=gradient_dtype(first), device=first.device)
        self.feedback.own = zeros(own)
        self.feedback.mean = zeros(mean) if mean else None
        return self.compressor.error_rank(self.averaging)[1]

    def _await(self) -> None:
        if self.home is not None and self._reached:
            self.home.value()

    def _make_room(self) -> None:
        """Move the part that is already reduced out of the buffer, before new gradients come."""
        self.allocate()
        if self.link is None and self._reached and self._earlier is None:
            assert self.buffer is not None
            self._earlier = own_part(self.buffer, self.shard).clone()


def runs_of_size(
    parameters: Sequence[nn.Parameter], bucket_bytes: int
) -> Iterator[tuple[nn.Parameter, ...]]:
    """Split parameters into runs of one dtype, one for each bucket.

    A bucket has at most `bucket_bytes`, unless it holds a single parameter.
    """
    run: list[nn.Parameter] = []
    run_bytes = 0
    limit = min(bucket_bytes, FIRST_BUCKET_BYTES)
    for parameter in parameters:
        size = parameter.numel() * gradient_dtype(parameter).itemsize
        same = not run or _dtypes(run[0]) == _dtypes(parameter)
        if run and (not same or run_bytes + size > limit):
            yield tuple(run)
            limit = bucket_bytes
            run, run_bytes = [], 0
        run.append(parameter)
        run_bytes += size
    if run:
        yield tuple(run)


def own_part(flat: Tensor, shard: Axis) -> Tensor:
    """Return this rank's part of a flat tensor, as a view."""
    return flat.view(shard.size, -1)[shard.rank]


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def _dtypes(parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
    return parameter.dtype, gradient_dtype(parameter)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
