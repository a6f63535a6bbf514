"""Replays the logs of all ranks as GPUs would run them, with one stream for each communicator.

What a rank computes runs in its order, and waits for an operation where the rank waited. An
operation begins on a rank when that has computed what it had to when the operation was issued, and
when the operation before it on the same stream has ended. It moves bytes when it has begun on all
of its ranks, and ends on all of them at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.strict.log import Communicator, Computed, Event, Issued

_MESSAGES = ("send", "recv")
_UNEVEN = ("all_to_all",)  # whose ranks may send unlike amounts


class DeadlockError(AssertionError):
    """Ranks that wait for each other for ever."""


class MismatchError(AssertionError):
    """An operation that not all of its ranks have issued, or not with the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long what is in the logs takes."""

    of_work: Callable[[Hashable], float] = lambda _: 0.0
    of_operation: Callable[[Issued], float] = lambda _: 0.0


@dataclass(slots=True)
class _Operation:
    """An operation on all of its ranks: when each of them is ready, and when it ends."""

    parts: list[_Part] = field(default_factory=list)
    end: float | None = None


@dataclass(slots=True)
class _Part:
    """An operation on one rank."""

    issued: Issued
    rank: int
    whole: _Operation = field(default_factory=_Operation)
    before: _Slot | None = None  # on the stream
    slot: _Slot | None = None
    issued_at: float | None = None


@dataclass(slots=True)
class _Slot:
    """What one stream runs at once: an operation, or a batch."""

    parts: list[_Part] = field(default_factory=list)
    before: _Slot | None = None

    def end(self) -> float | None:
        """Return when all of it has ended, if that is known."""
        ends = [one.whole.end for one in self.parts]
        return None if None in ends else max(end for end in ends if end is not None)

    def ready(self) -> float | None:
        """Return when it can begin, if that is known."""
        issued = self.parts[-1].issued_at
        before = 0.0 if self.before is None else self.before.end()
        return None if issued is None or before is None else max(issued, before)


def step_seconds(logs: Sequence[Sequence[Event]], durations: Durations) -> float:
    """Return when the last rank has done all that is in its log; raise where some never do."""
    return _Replay(logs, durations, _by_communicator).run()


def ideal_seconds(logs: Sequence[Sequence[Event]], durations: Durations) -> float:
    """Return the same where no operation waits for another on its stream."""
    return _Replay(logs, durations, _by_itself).run()


def blocked_share(logs: Sequence[Sequence[Event]], durations: Durations) -> float:
    """Return by which share of the ideal streams make the ranks slower."""
    return step_seconds(logs, durations) / ideal_seconds(logs, durations) - 1


def _by_communicator(one: Issued) -> Hashable:
    return one.communicator


def _by_itself(one: Issued) -> Hashable:
    return one.number if one.batch is None else ("batch", one.batch)


class _Replay:
    """The ranks under way: how far each is in its log, and what it has computed till then."""

    def __init__(
        self,
        logs: Sequence[Sequence[Event]],
        durations: Durations,
        stream_of: Callable[[Issued], Hashable],
    ) -> None:
        self._logs, self._durations = logs, durations
        self._at = [0] * len(logs)
        self._seconds = [0.0] * len(logs)
        self._parts = [dict(_parts(log, rank, stream_of)) for rank, log in enumerate(logs)]
        self._open = _matched([one for own in self._parts for one in own.values()])

    def run(self) -> float:
        """Return when the last rank is done."""
        while any(at < len(log) for at, log in zip(self._at, self._logs, strict=True)):
            moved = [self._advance(rank) for rank in range(len(self._logs))]
            if not any((*moved, self._settle())):
                raise DeadlockError("; ".join(self._waiting()))
        while self._settle():
            pass
        if self._open:
            raise DeadlockError(f"{len(self._open)} operations never end")
        ends = [one.whole.end or 0.0 for own in self._parts for one in own.values()]
        return max(*self._seconds, *ends, 0.0)

    def _advance(self, rank: int) -> bool:
        """Go on in a rank's log as far as can be; return whether that is any further."""
        begun = self._at[rank]
        for event in self._logs[rank][begun:]:
            if isinstance(event, Computed):
                self._seconds[rank] += self._durations.of_work(event.work)
            elif isinstance(event, Issued):
                self._parts[rank][event.number].issued_at = self._seconds[rank]
            else:
                slot = self._parts[rank][event.number].slot
                assert slot is not None
                end = slot.end()
                if end is None:
                    break
                self._seconds[rank] = max(self._seconds[rank], end)
            self._at[rank] += 1
        return self._at[rank] > begun

    def _settle(self) -> bool:
        """Find the ends of operations whose beginnings are known; return whether there were any."""
        left = []
        for one in self._open:
            ready = [part.slot.ready() for part in one.parts if part.slot is not None]
            if None in ready:
                left.append(one)
                continue
            begun = max(each for each in ready if each is not None)
            one.end = begun + self._durations.of_operation(one.parts[0].issued)
        is_settled = len(left) < len(self._open)
        self._open = left
        return is_settled

    def _waiting(self) -> Iterator[str]:
        for rank, (at, log) in enumerate(zip(self._at, self._logs, strict=True)):
            if at < len(log):
                event = log[at]
                assert not isinstance(event, Computed)
                issued = self._parts[rank][event.number].issued
                peer = "" if issued.peer is None else f" with rank {issued.peer}"
                yield f"rank {rank} waits for {issued.op}{peer} on {issued.communicator.name}"


def _parts(
    log: Sequence[Event], rank: int, stream_of: Callable[[Issued], Hashable]
) -> Iterator[tuple[int, _Part]]:
    """Yield the operations of a rank by their numbers, each in its slot of its stream."""
    last: dict[Hashable, _Slot] = {}
    batches: dict[int, _Slot] = {}
    for event in log:
        if not isinstance(event, Issued):
            continue
        part = _Part(issued=event, rank=rank)
        slot = batches.get(event.batch) if event.batch is not None else None
        if slot is None:
            slot = _Slot(before=last.get(stream_of(event)))
            last[stream_of(event)] = slot
            if event.batch is not None:
                batches[event.batch] = slot
        part.slot = slot
        slot.parts.append(part)
        yield event.number, part


def _matched(parts: Sequence[_Part]) -> list[_Operation]:
    """Return operations from the parts that ranks have of them, matched in their order."""
    counts: defaultdict[Hashable, int] = defaultdict(int)
    found: dict[Hashable, _Operation] = {}
    for part in parts:
        key = _key(part)
        number = counts[key, part.rank]
        counts[key, part.rank] += 1
        part.whole = found.setdefault((key, number), _Operation())
        part.whole.parts.append(part)
    for one in found.values():
        _check(one)
    return list(found.values())


def _key(part: _Part) -> tuple[Communicator, int, int]:
    """Return the communicator, and of a message who sends it to whom."""
    one = part.issued
    if one.op == "send":
        return one.communicator, part.rank, _peer(one)
    if one.op == "recv":
        return one.communicator, _peer(one), part.rank
    return one.communicator, -1, -1


def _peer(one: Issued) -> int:
    assert one.peer is not None
    return one.peer


def _check(one: _Operation) -> None:
    first = one.parts[0].issued
    is_message = first.op in _MESSAGES
    needed = 2 if is_message else len(first.communicator.ranks)
    told = ", ".join(
        f"rank {part.rank} has {part.issued.op} of {part.issued.size_bytes} bytes"
        for part in one.parts
    )
    sizes = {part.issued.size_bytes for part in one.parts}
    ops = {part.issued.op for part in one.parts}
    is_whole = len(one.parts) == needed and (is_message or len(ops) == 1)
    if not is_whole or (len(sizes) > 1 and first.op not in _UNEVEN):
        raise MismatchError(f"on {first.communicator.name}, {needed} ranks: {told}")
