"""Turns the gradients of one rank into their mean over an axis, by the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.mesh import Axis
from autopar.runtime.transport import ComingSum

HALF_DTYPES = (torch.bfloat16, torch.float16)
FIRST_BUCKET_BYTES = 2**20  # small, as DDP's, so that messages start early in the backward
CACHED_BYTES = 2**20  # of a bucket that a second pass finds in the cache of a core


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """A flat buffer that several gradients are views of, and its reduction under way."""

    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor | None = None  # made when the first gradient comes
    views: tuple[Tensor, ...] = ()
    missing: int = 0  # gradients still to come in this step
    wire: Tensor | None = None  # what travels: the buffer itself or its 16-bit copy
    coming: ComingSum | None = None

    def allocate(self) -> Tensor:
        """Make the buffer, unless it is there, and return it."""
        if self.buffer is None:
            first = self.parameters[0]
            sizes = [parameter.numel() for parameter in self.parameters]
            self.buffer = torch.zeros(sum(sizes), dtype=_gradient_dtype(first), device=first.device)
            parts = zip(self.buffer.split(sizes), self.parameters, strict=True)  # type: ignore[no-untyped-call]
            self.views = tuple(part.view(parameter.shape) for part, parameter in parts)
        return self.buffer

    def adopt(self, places: Sequence[int]) -> None:
        """Copy gradients into their places and let the parameters refer to them there."""
        self.allocate()
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
        buffer = self.allocate()
        if buffer.numel() * buffer.element_size() <= CACHED_BYTES:
            self.adopt(range(len(self.parameters)))
            buffer.div_(ranks)
            return
        here = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is view:
                here.append(view)
            else:
                torch.div(parameter.grad, ranks, out=view)
                parameter.grad = view
        if here:
            torch._foreach_div_(here, ranks)


class GradientBuckets:
    """Reduces gradients over an axis as soon as a bucket of them is complete.

    It does what DistributedDataParallel does, without wrapping the module, and also where DDP
    cannot: fp32 gradients of 16-bit parameters (`Tensor.grad_dtype`), backwards that are split in
    two (zero bubble) or cut into stages, parameters that the loss does not reach (they keep no
    gradient, as on one device, so weight decay passes them by).
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.sync = True  # False while microbatches only accumulate
        self.finishes_with_backward = True  # a pipeline stage ends the reduction itself
        self._axis = axis
        self._bucket_bytes = bucket_bytes
        self._wire_dtype = wire_dtype
        # A sum of many undivided gradients would leave the range of fp16.
        self._divides_first = axis.is_gloo or wire_dtype is not None
        self._buckets: tuple[_Bucket, ...] = ()
        self._next_to_launch = 0
        self._finish_is_queued = False
        # Until the first forward, parameters may still be replaced (built on the meta device).
        self._first_forward = module.register_forward_pre_hook(self._attach)

    def allocate(self, module: nn.Module) -> None:
        """Make all buffers now; else each is made when the first gradient comes."""
        if not self._buckets:
            self._attach(module, None)
        for bucket in self._buckets:
            bucket.allocate()

    def _attach(self, module: nn.Module, _: object) -> None:
        """Watch the parameters that the module has now."""
        self._first_forward.remove()
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trainable:
            if parameter.dtype in HALF_DTYPES:
                parameter.grad_dtype = torch.float32
        if self._axis.size == 1:
            return
        # The backward meets the parameters about in reverse: the first full bucket leaves early.
        self._buckets = tuple(_buckets(trainable[::-1], self._bucket_bytes))
        for bucket in self._buckets:
            for place in range(len(bucket.parameters)):
                self._watch(bucket, place)
        self._reset()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory of the gradients, as far as there were any."""
        return tuple(b.buffer for b in self._buckets if b.buffer is not None)

    def take_in(self) -> None:
        """Move gradients that came past the hooks, as those of a split backward do, into place."""
        for bucket in self._buckets:
            bucket.adopt([n for n, p in enumerate(bucket.parameters) if p.grad is not None])

    def _watch(self, bucket: _Bucket, place: int) -> None:
        """Notice every new gradient; it moves into the bucket at once or with the whole bucket."""

        def gradient_is_here(_: Tensor) -> None:
            if not self.sync:
                bucket.adopt((place,))
                return
            bucket.missing -= 1
            if not self._finish_is_queued:
                self._queue_finish()
            if bucket.missing == 0:
                self._launch_what_is_complete()

        bucket.parameters[place].register_post_accumulate_grad_hook(gradient_is_here)  # type: ignore[no-untyped-call]

    def _queue_finish(self) -> None:
        """Have the engine end the reduction when this backward is over."""
        if self.finishes_with_backward:
            self._finish_is_queued = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)

    def _launch_what_is_complete(self) -> None:
        """Start reductions in one order on all ranks, whatever order the gradients came in."""
        while self._next_to_launch < len(self._buckets):
            bucket = self._buckets[self._next_to_launch]
            if bucket.missing > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        self._next_to_launch += 1
        operation = dist.ReduceOp.AVG
        if self._divides_first:
            bucket.adopt_shares(self._axis.size)
            operation = dist.ReduceOp.SUM
        else:
            bucket.adopt(range(len(bucket.parameters)))
        buffer = bucket.allocate()
        bucket.wire = buffer if self._wire_dtype is None else buffer.to(self._wire_dtype)
        bucket.coming = ComingSum(bucket.wire, self._axis, operation=operation)

    def finish(self) -> None:
        """Reduce what is left and wait; afterwards every gradient is the mean over the axis."""
        for bucket in self._buckets[self._next_to_launch :]:
            self._launch(bucket)
        for bucket in self._buckets:
            if bucket.coming is not None:
                bucket.coming.value()
            if bucket.wire is not None and bucket.wire is not bucket.buffer:
                bucket.allocate().copy_(bucket.wire)
        self._reset()

    def _reset(self) -> None:
        self._next_to_launch = 0
        self._finish_is_queued = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.wire = bucket.coming = None


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[_Bucket]:
    """Cut the parameters into runs of one dtype and at most `bucket_bytes`, or one parameter."""
    run: list[nn.Parameter] = []
    run_bytes = 0
    limit = min(bucket_bytes, FIRST_BUCKET_BYTES)
    for parameter in parameters:
        size = parameter.numel() * _gradient_dtype(parameter).itemsize
        same = not run or _gradient_dtype(run[0]) == _gradient_dtype(parameter)
        if run and (not same or run_bytes + size > limit):
            yield _Bucket(parameters=tuple(run))
            limit = bucket_bytes
            run, run_bytes = [], 0
        run.append(parameter)
        run_bytes += size
    if run:
        yield _Bucket(parameters=tuple(run))


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype
