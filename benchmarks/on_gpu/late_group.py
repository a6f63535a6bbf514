"""A process group that behaves as nccl does, for several processes on one device.

nccl allows one process per device. This group moves tensors by gloo instead, through pinned copies
on a stream of its own, and delays both copies, so that a missing `wait()` shows as NaN or as old
values. Like nccl, it refuses tensors of another device, tensors with gaps, and types that nccl does
not have. On a CPU the same code runs without streams.
"""

# ruff: noqa: ARG002  torch hands options to all messages

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.strict.refusals import refuse

NAME = "late"
_DELAY_SECONDS = 0.3e-3  # before a tensor is read, and again before a result is written
_CYCLES_PER_SECOND = 1.8e9  # of a GPU, about
_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.AVG: lambda stack: stack.sum(0) / len(stack),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
}

_Group: Any = dist.ProcessGroup  # Any, as its annotations differ between versions of torch
# copies of inputs on the CPU → results there
Moved = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def register(device: str) -> None:
    """Make `dist.init_process_group("late")` known, for tensors of one kind of device."""
    kind = torch.device(device)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> LateGroup:
        return LateGroup(store, rank, size, timeout, kind)

    dist.Backend.register_backend(NAME, create, devices=[kind.type])


class LateWork(dist.Work):
    """One message: `wait()` makes the current stream wait for its result."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Event()  # the result is written or, on a GPU, queued
        self._mark: Any = None
        self._error: BaseException | None = None

    def end(self, mark: Any = None, error: BaseException | None = None) -> None:
        """Wake the threads that wait."""
        self._mark, self._error = mark, error
        self._written.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result; on a GPU, let the current stream wait for it."""
        self._written.wait()
        if self._error is not None:
            raise RuntimeError(f"a message failed: {self._error}") from self._error
        if self._mark is not None:
            torch.cuda.current_stream().wait_event(self._mark)
        return True

    def is_completed(self) -> bool:
        """Whether the result is written."""
        return self._written.is_set() and (self._mark is None or bool(self._mark.query()))

    def is_success(self) -> bool:
        """Whether it is written, and nothing failed."""
        return self.is_completed() and self._error is None


class LateGroup(_Group):  # type: ignore[misc]
    """Moves tensors of one device late, each message after the one before."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._device = rank, size, device
        gloo: Any = dist.ProcessGroupGloo
        self._gloo = gloo(store, rank, size, timeout)
        self._name = ""
        self._stream: Any = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def _get_backend(self, _: torch.device) -> Any:
        return self._gloo  # whose time-out torch sets

    def getBackendName(self) -> str:  # noqa: N802  as torch calls it
        """Return the name of this backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name that torch has given the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def shutdown(self) -> None:
        """End the thread, when all messages have arrived."""
        self._jobs.put(None)

    abort = shutdown

    # ------------------------------------------------------------------ messages of all ranks

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> LateWork:
        """Reduce each tensor over the ranks, in place."""
        reduced = _reduction(opts.reduceOp)
        return self._start(
            tensors, tensors, lambda own: [reduced(self._of_all(one)).to(one.dtype) for one in own]
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> LateWork:
        """Give each tensor of the root to all ranks."""
        return self._start(
            tensors, tensors, lambda own: [self._of_all(one)[opts.rootRank] for one in own]
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> LateWork:
        """Give every rank the tensors of all ranks, each in a tensor of its own."""
        flat = [one for several in outputs for one in several]
        return self._start(
            inputs, flat, lambda own: [part for one in own for part in self._of_all(one)]
        )

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> LateWork:
        """Give the root the tensors of all ranks; the other ranks pass no outputs."""
        received = [one for several in outputs for one in several]

        def moved(own: Sequence[Tensor]) -> list[Tensor]:
            return list(self._of_all(own[0]))[: len(received)]

        return self._start(inputs, received, moved)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any) -> LateWork:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> LateWork:
        """Give every rank the tensors of all ranks in one tensor."""
        return self._start(inputs, outputs, lambda own: [self._of_all(one) for one in own])

    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _reduce_scatter_base(self, output: Tensor, own: Tensor, opts: Any) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> LateWork:
        """Reduce the tensors of all ranks, and give every rank its part of the result."""
        reduced = _reduction(opts.reduceOp)

        def moved(own: Sequence[Tensor]) -> list[Tensor]:
            return [
                reduced(self._of_all(one).view(self._size, self._size, -1)[:, self._rank]).to(
                    one.dtype
                )
                for one in own
            ]

        return self._start(inputs, outputs, moved)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall_base(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> LateWork:
        """Send each rank its part of a tensor; without sizes, all parts are equally large."""

        def moved(copies: Sequence[Tensor]) -> list[Tensor]:
            (mine,) = copies
            received = torch.empty(output.shape, dtype=output.dtype)
            per_row = max(mine[:1].numel(), 1)
            rows = list(input_sizes) or [len(mine) // self._size] * self._size
            coming = list(output_sizes) or [len(received) // self._size] * self._size
            width = per_row * mine.element_size()
            self._gloo.alltoall_base(
                _as_bytes(received),
                _as_bytes(mine),
                [size * width for size in coming],
                [size * width for size in rows],
            ).wait()
            return [received]

        return self._start([own], [output], moved)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> LateWork:
        """Wait until all ranks are here."""

        def moved(_: Sequence[Tensor]) -> list[Tensor]:
            self._gloo.barrier().wait()
            return []

        return self._start([], [], moved)

    # ------------------------------------------------------------------ from rank to rank

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> LateWork:
        """Send a tensor; gloo keeps the order of messages to the same rank."""
        self._check(tensors)
        work = LateWork()
        begun = self._mark_now()

        def send() -> None:
            copies = self._copied(tensors, begun)
            posted = [self._gloo.send([_as_bytes(one)], rank, tag) for one in copies]
            threading.Thread(target=_told(lambda: _end(posted, copies), work), daemon=True).start()

        def _end(posted: Sequence[Any], _: Sequence[Tensor]) -> None:
            for one in posted:
                one.wait()
            work.end()

        self._queue(_told(send, work))
        return work

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> LateWork:
        """Receive a tensor. gloo is asked at once, so that two ranks can send to each other."""
        self._check(tensors)
        received = [torch.empty(one.shape, dtype=one.dtype) for one in tensors]
        coming = [self._gloo.recv([_as_bytes(one)], rank, tag) for one in received]
        work = LateWork()
        begun = self._mark_now()

        def receive() -> None:
            for one in coming:
                one.wait()
            self._finish(work, tensors, received, begun)

        threading.Thread(target=_told(receive, work), daemon=True).start()
        return work

    # ------------------------------------------------------------------ how a message goes

    def _start(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], moved: Moved) -> LateWork:
        """Queue a message, which begins after all work that the current stream has now."""
        self._check([*inputs, *outputs])
        work = LateWork()
        begun = self._mark_now()

        def move() -> None:
            copies = self._copied(inputs, begun)
            self._poison(outputs)
            self._finish(work, outputs, moved(copies), begun)

        self._queue(_told(move, work))
        return work

    def _queue(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it the tensors of the message

    def _check(self, tensors: Sequence[Tensor]) -> None:
        for one in tensors:
            refuse(NAME, one, self._device.type)

    def _mark_now(self) -> Any:
        if self._device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _copied(self, tensors: Sequence[Tensor], begun: Any) -> list[Tensor]:
        """Return copies on the CPU, made late."""
        if self._stream is None:
            time.sleep(_DELAY_SECONDS)
            return [one.detach().clone() for one in tensors]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(begun)
            _delay()
            copies = [_pinned(one).copy_(one.detach(), non_blocking=True) for one in tensors]
        self._stream.synchronize()
        return copies

    def _poison(self, outputs: Sequence[Tensor]) -> None:
        """Fill the outputs with NaN, until the results are written."""
        with torch.no_grad(), self._within():
            for one in outputs:
                if one.is_floating_point():
                    one.data.fill_(torch.nan)

    def _finish(
        self, work: LateWork, outputs: Sequence[Tensor], results: Sequence[Tensor], begun: Any
    ) -> None:
        """Write the results late, and hold all tensors until that is done."""
        mark = None
        with torch.no_grad(), self._within():
            if begun is not None:
                self._stream.wait_event(begun)
            _delay() if self._stream is not None else time.sleep(_DELAY_SECONDS)
            staged = [_pinned(one).copy_(one) for one in results] if self._stream else results
            for output, result in zip(outputs, staged, strict=True):
                output.data.copy_(result.view(output.shape), non_blocking=True)
            if self._stream is not None:
                mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
                mark.record()
        work.end(mark)
        if mark is not None:
            mark.synchronize()

    def _within(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _of_all(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        every = [torch.empty_like(own) for _ in range(self._size)]
        if own.numel():
            self._gloo.allgather([[_as_bytes(one) for one in every]], [_as_bytes(own)]).wait()
        return torch.stack(every)


def _told(job: Callable[[], None], work: LateWork) -> Callable[[], None]:
    """Return a job that hands its error to those who wait for `work`."""

    def run() -> None:
        try:
            job()
        except BaseException as error:
            work.end(error=error)

    return run


def _reduction(operation: Any) -> Callable[[Tensor], Tensor]:
    function = next(found for one, found in _REDUCTIONS.items() if operation == one)

    def reduced(stack: Tensor) -> Tensor:
        return function(stack.float() if stack.dtype.itemsize == 2 else stack)

    return reduced


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _delay() -> None:
    torch.cuda._sleep(int(_DELAY_SECONDS * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
