"""Ranks that stand still find who is the cause, however many they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.checkpointing.watch import (
    Message,
    RankPlace,
    RollCall,
    RollCallResult,
    UnderWay,
    places_in_words,
)

WATCH = "autopar.runtime.checkpointing.watch"
RANKS, STOPPED, PER_NODE = 64, 37, 8
NOTHING = UnderWay(begun={})
LAST = Message(group="3 collective", number=41, description="all_reduce 41 of the tensor axis")


def place(rank: int, where: str = "waits", under_way: UnderWay = NOTHING) -> RankPlace:
    return RankPlace(rank=rank, where=where, under_way=under_way)


class CountingStore:
    """What a rank has of a store; it counts the calls of the rank."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def ask_all(
    ranks: Sequence[int], nodes: Sequence[str], *, patience_seconds: float = 2.0
) -> tuple[list[RollCallResult], list[int]]:
    """Have ranks answer a call at once; return all that they find, and how often each calls."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    stores = {rank: CountingStore(store) for rank in ranks}

    def answer(rank: int) -> RollCallResult:
        call = RollCall(stores[rank], "word", nodes, rank, patience_seconds=patience_seconds)
        return call.answer(place(rank))

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(answer, ranks))
    return found, [one.calls for one in stores.values()]


def test_64_ranks_find_the_one_that_says_nothing() -> None:
    nodes = [str(rank // PER_NODE) for rank in range(RANKS)]
    found, calls = ask_all([rank for rank in range(RANKS) if rank != STOPPED], nodes)
    assert {one.silent for one in found} == {(STOPPED,)}
    assert {one.teller for one in found} == {0}
    assert found[0].description.startswith(f"rank {STOPPED} does not answer, and may be stopped; ")
    few = 4  # to tell, to ask who reads, to wait, and to read what was found
    assert sum(count <= few for count in calls) == RANKS - 1 - RANKS // PER_NODE
    assert sum(calls) < 10 * RANKS


def test_the_first_rank_that_answers_prints_the_result() -> None:
    found, _ = ask_all([1, 2], ["a", "a", "b"], patience_seconds=0.5)
    assert {(one.teller, one.silent) for one in found} == {(1, (0,))}


def test_a_late_rank_is_waited_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    now = [0.0]

    def sleep(seconds: float) -> None:
        before, now[0] = now[0], now[0] + seconds
        if before < 7 <= now[0]:  # longer than the first wait, shorter than both
            store.append("word/places", place(1).to_line())

    monkeypatch.setattr(f"{WATCH}.time.sleep", sleep)
    monkeypatch.setattr(f"{WATCH}.time.monotonic", lambda: now[0])
    found = RollCall(store, "word", ["a", "a"], 0, patience_seconds=5.0).answer(place(0))
    assert found.silent == ()
    assert 7 <= now[0] < 10


def test_silent_ranks_are_named_first_then_places_of_few_ranks() -> None:
    places = [place(0), place(2), place(3, "reads")]
    told = "rank 1 does not answer, and may be stopped; rank 3 reads; ranks 0, 2 waits"
    assert places_in_words(places, [1]) == told
    assert places_in_words([place(0)]) == "rank 0 waits"


def test_a_collective_that_one_rank_has_not_begun_is_named() -> None:
    waits = UnderWay(begun={LAST.group: 43}, waits_for=LAST)
    lags = UnderWay(begun={LAST.group: 40})
    told = places_in_words([place(0, "in step", waits), place(1, "in step", lags)])
    assert told == (
        "rank 0 in step, for all_reduce 41 of the tensor axis; "
        "rank 1 in step, and has not begun all_reduce 41 of the tensor axis"
    )


def test_a_rank_that_waits_for_a_late_one_is_not_called_late() -> None:
    other = Message(group="5 collective", number=8, description="all_gather 8 of the data axis")
    waits = UnderWay(begun={LAST.group: 41, other.group: 7}, waits_for=LAST)
    waits_too = UnderWay(begun={other.group: 8}, waits_for=other)
    lags = UnderWay(begun={LAST.group: 40})
    told = places_in_words([place(0, "a", waits), place(1, "b", waits_too), place(2, "c", lags)])
    assert told.count("has not begun") == 1
    assert "rank 2 c, and has not begun all_reduce 41" in told
