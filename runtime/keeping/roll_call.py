"""Has ranks that stand still tell each other where, by a store, and finds those that say nothing.

Each rank appends one line to one key, one rank of each node reads that, and all wait for what was
found: the store, which one thread of one rank serves, gets a few calls from each rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from autopar.runtime.keeping.under_way import Message, UnderWay, not_begun

_POLL_SECONDS = 0.5
_LEAST_SECONDS = 5.0  # in which all ranks tell where they are
_RANKS_PER_SECOND = 50  # that connect to the store and tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is, and what it has begun."""

    rank: int
    where: str
    under_way: UnderWay

    def to_line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def _place_of(line: str) -> Place:
    found = json.loads(line)
    waits_for = found["under_way"]["waits_for"]
    return Place(
        rank=found["rank"],
        where=found["where"],
        under_way=UnderWay(
            begun=found["under_way"]["begun"],
            waits_for=None if waits_for is None else Message(**waits_for),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a call has found."""

    teller: int  # the first rank that answers, which tells it
    silent: tuple[int, ...]
    told: str


class RollCall:
    """One call of all ranks, seen from one of them.

    `word` is one that no other call has, `nodes` names the node of each rank.
    """

    def __init__(
        self,
        store: Any,
        word: str,
        nodes: Sequence[str],
        rank: int,
        *,
        patience_seconds: float | None = None,
    ) -> None:
        self._store, self._word, self._nodes, self._rank = store, word, nodes, rank
        enough = _LEAST_SECONDS + len(nodes) / _RANKS_PER_SECOND
        self._patience_seconds = enough if patience_seconds is None else patience_seconds
        self.reads = False  # whether this rank reads for its node

    def answer(self, place: Place) -> Found:
        """Tell where this rank is; return what all have told. A store that has gone raises."""
        self._store.append(self._key("places"), place.to_line())
        self.reads = self._store.add(self._key(f"reader of {self._nodes[self._rank]}"), 1) == 1
        if self.reads:
            found = self._read()
            if self._nodes[found.teller] == self._nodes[self._rank]:
                self._store.set(self._key("found"), json.dumps(asdict(found)))
        self._store.wait([self._key("found")], timedelta(seconds=3 * self._patience_seconds))
        told = json.loads(self._store.get(self._key("found")))
        return Found(teller=told["teller"], silent=tuple(told["silent"]), told=told["told"])

    def note_told(self) -> None:
        """Let the others leave: torchrun ends all ranks as soon as one has left."""
        self._store.set(self._key("told"), "")

    def wait_until_told(self) -> None:
        """Wait until it is told what was found."""
        self._store.wait([self._key("told")], timedelta(seconds=self._patience_seconds))

    def _key(self, name: str) -> str:
        return f"{self._word}/{name}"

    def _read(self) -> Found:
        """Return who has told what in time; who is silent is waited for once more."""
        places = self._places()
        if len(places) < len(self._nodes):
            places = self._places()
        silent = [rank for rank in range(len(self._nodes)) if rank not in places]
        return Found(
            teller=min(places), silent=tuple(silent), told=told_places(places.values(), silent)
        )

    def _places(self) -> Mapping[int, Place]:
        """Return where all ranks are, or those that have told it when patience is over."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            left = deadline - time.monotonic()
            lines = self._store.get(self._key("places")).decode().splitlines()
            if len(lines) == len(self._nodes) or left <= 0:
                return {one.rank: one for one in map(_place_of, lines)}
            time.sleep(min(_POLL_SECONDS, left))


def told_places(places: Iterable[Place], silent: Sequence[int] = ()) -> str:
    """Say where ranks are: first those that say nothing, then the few that are elsewhere."""
    every = sorted(places, key=lambda place: place.rank)
    missing = not_begun({one.rank: one.under_way for one in every})
    found: dict[str, list[int]] = {}
    for one in every:
        found.setdefault(_told(one, missing.get(one.rank)), []).append(one.rank)
    parts = [(list(silent), "answers nothing, as one that is stopped")] if silent else []
    few_first = sorted(found.items(), key=lambda one: len(one[1]))
    parts += [(ranks, told) for told, ranks in few_first]
    return "; ".join(f"{_ranks(ranks)} {told}" for ranks, told in parts)


def _told(place: Place, missing: str | None) -> str:
    if missing is not None:
        return f"{place.where}, and has not begun {missing}"
    waited = place.under_way.waits_for
    return place.where if waited is None else f"{place.where}, for {waited.told}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
