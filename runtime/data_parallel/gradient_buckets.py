"""Averages gradients over the data axis, bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.averaging import Averaging, Compressor
from autopar.runtime.data_parallel.buckets import HALF_DTYPES, Bucket, runs_of_size
from autopar.runtime.ranks.transport import HostLink
from autopar.runtime.tensor.shards import is_listed


class GradientBuckets:
    """Averages gradients over the data axis during the backward, in buckets.

    A bucket's reduction starts when its gradients and those of all earlier buckets are complete.
    DistributedDataParallel does the same, but wraps the module. This class also handles what DDP
    cannot: fp32 gradients of 16-bit parameters (`Tensor.grad_dtype`), backwards split into halves
    (zero bubble) or stages, and means of which each rank needs only a part (ZeRO-1). Parameters
    that the loss does not reach keep no gradient, as on one device, so weight decay skips them.
    """

    def __init__(
        self,
        module: nn.Module,
        averaging: Averaging,
        *,
        bucket_bytes: int,
        apart: Sequence[Collection[str]] = (),
        half: torch.dtype | None = None,
        link: HostLink | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        self._module = module
        self.half = half  # the parameters' dtype in forward and backward
        self.link = link  # to the host, if gradients go there in every backward
        self.sync = True  # False while microbatches only accumulate
        # False for a pipeline stage, which finishes the reduction itself
        self.finishes_with_backward = True
        self.buckets: tuple[Bucket, ...] = ()
        self.trainable: Mapping[str, nn.Parameter] = {}  # by name; empty until `attach`
        self.averaging = averaging
        self._bucket_bytes = bucket_bytes
        self._apart = apart
        self.compressor = compressor  # of gradients, except those in `apart`
        self._next_to_launch = 0
        self._finish_is_queued = False
        self._is_attached = False
        # Until the first forward, parameters may still be replaced (built on the meta device).
        self._first_forward = module.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self._first_forward.remove()
        self.attach()
        self.narrow()  # if no optimizer was built, the parameters are still in fp32

    def attach(self) -> None:
        """Register hooks on the module's trainable parameters; later calls do nothing."""
        if self._is_attached:
            return
        self._is_attached = True
        self.trainable = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        for parameter in self.trainable.values():
            if self.half is not None or parameter.dtype in HALF_DTYPES:
                parameter.grad_dtype = torch.float32
        if self.averaging.ranks == 1 and self.link is None:
            return
        # Buckets take parameters in reverse: roughly as the backward reaches them, so that the
        # first bucket is full early.
        order = {id(parameter): n for n, parameter in enumerate(reversed(self.trainable.values()))}
        buckets = (
            Bucket(parameters=run, averaging=self.averaging, link=self.link, compressor=compressor)
            for group, compressor in self._groups()
            for run in runs_of_size(group[::-1], self._bucket_bytes)
        )
        self.buckets = tuple(sorted(buckets, key=lambda one: order[id(one.parameters[-1])]))
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                self._watch(bucket, place)
        self._reset()

    def _groups(self) -> Iterator[tuple[list[nn.Parameter], Compressor | None]]:
        """Yield groups of parameters that share no bucket, each with its compressor or None.

        Parameters that `apart` does not name form the last groups.
        """
        left, compressor = dict(self.trainable), self.compressor
        for names in self._apart:
            taken = [name for name in left if is_listed(name, names)]
            if taken:
                yield [left.pop(name) for name in taken], None
        if compressor is not None:
            taken = [name for name, one in left.items() if compressor.takes(one)]
            if taken:
                yield [left.pop(name) for name in taken], compressor
        if left:
            yield list(left.values()), None

    def narrow(self) -> dict[int, Tensor]:
        """Cast the trainable parameters to `half`.

        Return their fp32 values by parameter id; the optimizer continues from these.
        """
        if self.half is None:
            return {}
        wide = [one for one in self.trainable.values() if one.dtype != self.half]
        held = {id(parameter): parameter.detach() for parameter in wide}
        for parameter in wide:
            parameter.data = parameter.data.to(self.half)
        return held

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The buffers of all buckets that exist now."""
        return tuple(tensor for bucket in self.buckets for tensor in bucket.allocated())

    def take_in(self) -> None:
        """Move gradients of split backwards, which bypass the hooks, into the buckets."""
        for bucket in self.buckets:
            bucket.adopt([n for n, p in enumerate(bucket.parameters) if p.grad is not None])

    def _watch(self, bucket: Bucket, place: int) -> None:
        """Register a hook on one parameter; the last gradient of a bucket starts its reduction.

        While microbatches only accumulate, the hook moves the gradient into the bucket at once.
        """

        def gradient_is_here(_: Tensor) -> None:
            if not self.sync:
                bucket.adopt((place,))
                return
            bucket.missing -= 1
            if self.finishes_with_backward and not self._finish_is_queued:
                self._finish_is_queued = True
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.finish)
            if bucket.missing == 0:
                self._launch_what_is_complete()

        bucket.parameters[place].register_post_accumulate_grad_hook(gradient_is_here)  # type: ignore[no-untyped-call]

    def _launch_what_is_complete(self) -> None:
        """Start reductions of complete buckets, in the same order on all ranks."""
        while self._next_to_launch < len(self.buckets):
            bucket = self.buckets[self._next_to_launch]
            if bucket.missing > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._next_to_launch += 1
        bucket.reduce()
        if self.link is not None and self.averaging.ranks == 1:
            bucket.settle()
        elif self.link is not None and self._next_to_launch > 1:
            self.buckets[self._next_to_launch - 2].settle()  # while this bucket is being reduced

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait for the means of all buckets."""
        for bucket in self.buckets[self._next_to_launch :]:
            self._launch(bucket)
        coming = [bucket for bucket in self.buckets if bucket.coming is not None]
        for bucket in coming:
            assert bucket.coming is not None
            bucket.coming.sum_over_replicas()
        for bucket in coming:
            bucket.settle()
        self._reset()

    def _reset(self) -> None:
        self._next_to_launch = 0
        self._finish_is_queued = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
