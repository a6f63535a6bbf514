"""An operation that ends late, in the thread of its communicator, and is seen after `wait()`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeAlias
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.strict.log import Communicator, Log
from tests.strict.refusals import RefusedError

# Begins to move what is sent. The function that it returns ends that, and returns what is to lie
# in the tensors that are filled.
Move: TypeAlias = Callable[[Sequence[Tensor]], Callable[[], Sequence[Tensor]]]


class Work(dist.Work):
    """An operation under way: its tensors are those of the operation until it is waited for."""

    def __init__(
        self, op: str, sent: Sequence[Tensor], filled: Sequence[Tensor], move: Move
    ) -> None:
        super().__init__()
        self.op, self.number = op, -1
        self._sent, self._filled, self._move = sent, filled, move
        self._copies: Sequence[Tensor] = [copied(one) for one in sent]
        for one in filled:
            _poison(one)
        self._poisoned: Sequence[Tensor] = [copied(one) for one in filled]
        self._done, self._log = threading.Event(), Log()
        self._finish: Callable[[], Sequence[Tensor]] = tuple
        self._made: Sequence[Tensor] = ()
        self._error: BaseException | None = None
        self._is_seen = False

    def noted(self, log: Log, communicator: Communicator, peer: int | None) -> Work:
        """Note it in a log."""
        size = sum(size_bytes(one) for one in (self._copies or self._filled))
        self._log, self.number = log, log.issue(communicator, self.op, size, peer)
        return self

    def begin(self) -> None:
        """Begin it, in the thread of its communicator."""
        try:
            self._finish = self._move(self._copies)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """End it."""
        try:
            self._made = self._finish()
        except BaseException as error:
            self._error = self._error or error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Let the outputs be seen, once they are there."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"{self.op} failed: {self._error}") from self._error
        if not self._is_seen:
            self._is_seen = True
            self._log.wait(self.number)
            with torch.no_grad(), _disable_current_modes():
                self._show()
            self._sent = self._filled = self._copies = self._poisoned = self._made = ()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def _show(self) -> None:
        memory = {one.untyped_storage().data_ptr() for one in self._filled}
        for own, copy in zip(self._sent, self._copies, strict=True):
            if own.untyped_storage().data_ptr() not in memory and not _same(own, copy):
                raise RefusedError(f"{self.op}: what is sent was changed before wait()")
        for own, poison in zip(self._filled, self._poisoned, strict=True):
            if not _same(own, poison):
                raise RefusedError(f"{self.op}: what is received was changed before wait()")
        for own, made in zip(self._filled, self._made, strict=True):
            own.data.copy_(made)  # as nccl's kernels, without a word to autograd


class Stream:
    """Runs the operations of a communicator in turn, in a thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Work] | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._queue,), daemon=True).start()
        finalize(self, self._queue.put, None)

    def put(self, works: list[Work]) -> None:
        """Have operations run beside each other, after those that were put before."""
        self._queue.put(works)

    def end(self) -> None:
        """End the thread, once all operations have ended."""
        self._queue.put(None)


def _run(queue: SimpleQueue[list[Work] | None]) -> None:
    """Run the operations of a communicator in turn; those of a batch beside each other."""
    while (works := queue.get()) is not None:
        for one in works:
            one.begin()
        beside = [threading.Thread(target=one.finish, daemon=True) for one in works[1:]]
        for thread in beside:
            thread.start()
        works[0].finish()
        for thread in beside:
            thread.join()
        del works, one, beside


def copied(tensor: Tensor) -> Tensor:
    """Return what a tensor holds now."""
    return tensor.detach().clone()


def _poison(tensor: Tensor) -> None:
    """Fill a tensor with what is no number, or is out of any range."""
    own = tensor.data
    if own.is_floating_point():
        own.fill_(float("nan"))
    elif own.dtype is torch.bool:
        own.fill_(True)
    else:
        own.fill_(torch.iinfo(own.dtype).max)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    own, others = (each.detach().contiguous().view(-1) for each in (one, other))
    return torch.equal(own.view(torch.uint8), others.view(torch.uint8))


def size_bytes(tensor: Tensor) -> int:
    """Return how much memory a tensor takes."""
    return tensor.numel() * tensor.element_size()
