"""Records what a rank tells its communicators to do, in the order in which it does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A process group: its name, and the ranks of the world that are in it, in their order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An operation that a rank has begun; it is under way until it is waited for."""

    number: int  # counts what this rank has issued
    communicator: Communicator
    op: str  # "send", "recv", or a collective
    size_bytes: int
    peer: int | None = None  # the other rank of a send or a receive, counted in the world
    batch: int | None = None  # operations of one batch_isend_irecv


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """The end of an operation, for which what the rank computes from here on waits."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A piece of computation; who replays a log knows how long it takes."""

    work: Hashable


Event: TypeAlias = Issued | Waited | Computed


class Log:
    """The events of one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._issued = self._batches = 0
        self._batch: int | None = None

    def issue(
        self, communicator: Communicator, op: str, size_bytes: int, peer: int | None = None
    ) -> int:
        """Note an operation; return its number."""
        number = self._issued
        self._issued += 1
        self.events.append(
            Issued(
                number=number,
                communicator=communicator,
                op=op,
                size_bytes=size_bytes,
                peer=peer,
                batch=self._batch,
            )
        )
        return number

    def wait(self, number: int) -> None:
        """Note that an operation is waited for."""
        self.events.append(Waited(number=number))

    def compute(self, work: Hashable) -> None:
        """Note a piece of computation."""
        self.events.append(Computed(work=work))

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Have what is issued inside run as one operation, as nccl's groups do."""
        self._batch = self._batches
        self._batches += 1
        try:
            yield
        finally:
            self._batch = None
