"""Ranks of a start agree on a word by few calls, whatever earlier starts have left."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autopar.runtime.ranks.network import _agreed_word

RANKS = 64
SOON = timedelta(minutes=5)


class CountingStore:
    """What a rank has of a store; it counts the bytes that the rank reads."""

    def __init__(self, store: Any) -> None:
        self._store, self.read_bytes = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        self.read_bytes += len(found)
        return found


def started(stores: Sequence[CountingStore]) -> list[str]:
    """Have all ranks of a start agree; return the word of each."""

    def agree(rank: int) -> str:
        return _agreed_word(stores[rank], rank, RANKS, SOON)  # type: ignore[arg-type]

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(agree, range(RANKS)))


def test_each_start_has_a_word_and_a_rank_reads_little() -> None:
    store, words = dist.HashStore(), set()  # type: ignore[attr-defined]
    for _ in range(2):  # the second finds what the first has left
        stores = [CountingStore(store) for _ in range(RANKS)]
        found = set(started(stores))
        assert len(found) == 1
        words |= found
        assert (
            max(one.read_bytes for one in stores[1:]) <= 10 * 32
        )  # a word, on a busy machine again
    assert len(words) == 2


def test_the_word_of_a_first_rank_that_has_gone_is_left() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def gone() -> None:
        """Tell a word as the first rank of an earlier start, which is about to be killed."""
        own = store.multi_get(["autopar/start/hello/1"])[0].decode()
        store.set(f"autopar/start/for/{own}", "gone")

    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(_agreed_word, store, 1, 2, SOON)
        gone()
        word = _agreed_word(store, 0, 2, SOON)
        assert late.result() == word != "gone"
