"""Notices that a training hangs, and prints where each rank is.

Torch's flight recorder shows which collectives a rank has started and which one it waits for. On a
GPU the host runs ahead of the device, so whatever hangs, every rank waits at a line that reads a
number. Comparing the collectives that ranks have started in each group shows the cause.

The ranks exchange their places through torchrun's store. Each rank appends one line to one key; one
rank per node reads it, and all wait for the result. A single thread serves the store, so each rank
makes only a few calls. A rank that writes nothing is taken to be stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist

from autopar.runtime.launchers import own_place
from autopar.runtime.ranks.leaving import FAILED, ExitReason, tell
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import record
from autopar.runtime.ranks.transport import every_rank

_STANDARD = sysconfig.get_path("stdlib")


def place_of_main_thread() -> str:
    """Return the main thread's place in the script, and its innermost frame outside libraries."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = traceback.extract_stack(frame)
    own = [one for one in frames if "site-packages" not in one.filename]
    own = [one for one in own if not one.filename.startswith(_STANDARD)] or list(frames)
    script = [one for one in own if Path(one.filename) == Path(sys.argv[0]).resolve()]
    return ", ".join(dict.fromkeys(map(_line, [*script[-1:], own[-1]])))


def _line(frame: traceback.FrameSummary) -> str:
    return f"in {frame.name} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective: its number is the same on all ranks of the group."""

    group: str
    number: int
    description: str  # the collective in words


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A rank's collectives: the last one started in each group, and the one it waits for."""

    begun: Mapping[str, int]
    waits_for: Message | None = None  # the first one that has not finished


def under_way() -> UnderWay:
    """Return this rank's collectives; none if the flight recorder is off or missing."""
    with suppress(Exception):  # an error here must not hide the rest of the message
        library: Any = torch._C._distributed_c10d
        is_nccl = dist.get_backend() == "nccl"
        dump = library._dump_nccl_trace_json if is_nccl else library._dump_fr_trace_json
        return _read(json.loads(dump(includeCollectives=True)).get("entries", []))
    return UnderWay(begun={})


def _read(entries: list[Mapping[str, Any]]) -> UnderWay:
    begun: dict[str, int] = {}
    waits_for: Message | None = None
    for one in entries:
        kind = "p2p" if one["is_p2p"] else "collective"
        name, described = one["process_group"]
        group, number = f"{name} {kind}", one[f"{kind}_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        if waits_for is None and not (one["retired"] or one["state"] == "completed"):
            op = str(one["profiling_name"]).rpartition(":")[2]  # without its library
            words = f"{op} {number:,} of {_axis(described)}"
            waits_for = Message(group=group, number=number, description=words)
    return UnderWay(begun=begun, waits_for=waits_for)


def _axis(described: str) -> str:
    """Return words for the ranks of a group, from its description."""
    if described.startswith("mesh_"):
        return f"the {described.removeprefix('mesh_')} axis"
    return "all ranks" if described == "default_pg" else f"group {described!r}"


def not_begun(ranks: Mapping[int, UnderWay]) -> Mapping[int, str]:
    """Return the ranks that delay others, each with the collective that it has not started.

    A rank that itself waits for a collective is not to blame, unless all ranks wait.
    """
    waited = [one.waits_for for one in ranks.values() if one.waits_for is not None]
    idle = {rank: one for rank, one in ranks.items() if one.waits_for is None}
    found: dict[int, str] = {}
    for rank, own in (idle or ranks).items():
        for one in waited:
            if own.begun.get(one.group, one.number) < one.number:
                found.setdefault(rank, one.description)
    return found


_POLL_SECONDS = 0.5
_LEAST_SECONDS = 5.0  # time for all ranks to write their places
_RANKS_PER_SECOND = 50  # that can connect to the store and write


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The code that a rank is running, and its collectives."""

    rank: int
    where: str
    under_way: UnderWay

    def to_line(self) -> str:
        """Return this place as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCallResult:
    """The result of a roll call."""

    teller: int  # the first rank that answers; it prints the result
    silent: tuple[int, ...]  # the ranks that do not answer
    description: str  # where each rank is, in words


class RollCall:
    """This rank's part in a roll call of all ranks.

    `word` identifies this call; `nodes` is the node of each rank.
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
        self.reads = False  # whether this rank reads the answers for its node

    def answer(self, place: RankPlace) -> RollCallResult:
        """Write this rank's place, and return the result. Raises if the store is gone."""
        self._store.append(self._key("places"), place.to_line())
        self.reads = self._store.add(self._key(f"reader of {self._nodes[self._rank]}"), 1) == 1
        if self.reads:
            found = self._read()
            if self._nodes[found.teller] == self._nodes[self._rank]:
                self._store.set(self._key("found"), json.dumps(asdict(found)))
        self._store.wait([self._key("found")], timedelta(seconds=3 * self._patience_seconds))
        answer = json.loads(self._store.get(self._key("found")))
        return RollCallResult(**{**answer, "silent": tuple(answer["silent"])})

    def note_printed(self) -> None:
        """Allow the other ranks to exit: torchrun kills all ranks once one has exited."""
        self._store.set(self._key("printed"), "")

    def wait_until_printed(self) -> None:
        """Wait until the result is printed."""
        self._store.wait([self._key("printed")], timedelta(seconds=self._patience_seconds))

    def _key(self, name: str) -> str:
        return f"{self._word}/{name}"

    def _read(self) -> RollCallResult:
        """Return the result from the places written in time; wait twice if ranks are missing."""
        places = self._places()
        if len(places) < len(self._nodes):
            places = self._places()
        silent = [rank for rank in range(len(self._nodes)) if rank not in places]
        return RollCallResult(
            teller=min(places),
            silent=tuple(silent),
            description=places_in_words(places.values(), silent),
        )

    def _places(self) -> Mapping[int, RankPlace]:
        """Return the places of all ranks, or those written before the timeout."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            left = deadline - time.monotonic()
            lines = self._store.get(self._key("places")).decode().splitlines()
            if len(lines) == len(self._nodes) or left <= 0:
                places = (record(RankPlace, json.loads(line)) for line in lines)
                return {one.rank: one for one in places}
            time.sleep(min(_POLL_SECONDS, left))


def places_in_words(places: Iterable[RankPlace], silent: Sequence[int] = ()) -> str:
    """Describe the places: silent ranks first, then places with few ranks, then the others."""
    every = sorted(places, key=lambda place: place.rank)
    missing = not_begun({one.rank: one.under_way for one in every})
    found: dict[str, list[int]] = {}
    for one in every:
        found.setdefault(_in_words(one, missing.get(one.rank)), []).append(one.rank)
    parts = [(list(silent), "does not answer, and may be stopped")] if silent else []
    few_first = sorted(found.items(), key=lambda one: len(one[1]))
    parts += [(ranks, words) for words, ranks in few_first]
    return "; ".join(f"{_ranks(ranks)} {words}" for ranks, words in parts)


def _in_words(place: RankPlace, missing: str | None) -> str:
    if missing is not None:
        return f"{place.where}, and has not begun {missing}"
    waited = place.under_way.waits_for
    return place.where if waited is None else f"{place.where}, for {waited.description}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_STORE_SECONDS = 30.0  # time for torchrun's store to answer
_PATIENT = 3  # how many times as long a step may take with a checkpoint or an evaluation


class Watch:
    """A thread on each rank that checks whether the training still takes steps.

    If it hangs, all ranks wait for one rank that has stopped, reads data endlessly, or calls
    another collective. The ranks exchange their places through torchrun's store. A rank that does
    not answer has stopped.
    """

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        self._mesh, self._seconds = mesh, seconds
        self._step = 0
        self._ended = threading.Event()
        self._patience = 1

    def begin(self, step: int, tell: Callable[[int, str], None]) -> None:
        """Start watching if there are several ranks; `tell` gets the printed message, too."""
        if not self._mesh.owns_processes or self._mesh.world.size == 1 or self._mesh.is_dry_run:
            return
        self._step, self._tell = step, tell
        own = (uuid4().hex, str(own_place().node), os.getpid())
        self._ranks: list[tuple[str, str, int]] = every_rank(own, self._mesh.world)
        threading.Thread(target=self._look, daemon=True).start()

    def note(self, step: int, *, evaluates_next: bool = False) -> None:
        """Record that a step has ended, and whether an evaluation comes with the next one."""
        self._step = step
        self._patience = _PATIENT if evaluates_next else 1

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow more time for the code inside, because disks may be slow."""
        before, self._patience = self._patience, _PATIENT
        yield
        self._patience = before

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _look(self) -> None:
        tick = min(self._seconds / 10, 1.0)
        # counted in ticks, so that time in which this process was suspended does not count
        seen, waited = self._step, 0.0
        while not self._ended.wait(tick):
            seen, waited = self._step, waited + tick if self._step == seen else 0.0
            if waited >= self._seconds * self._patience:
                self._give_up(waited)

    def _give_up(self, waited: float) -> NoReturn:
        """Print where all ranks are, on the first rank that answers, and exit."""
        place = RankPlace(
            rank=self._mesh.rank,
            where=f"after step {self._step:,}, {place_of_main_thread()}",
            under_way=under_way(),
        )
        word, nodes = self._ranks[0][0], [node for _, node, _ in self._ranks]
        found = RollCallResult(
            teller=self._mesh.rank, silent=(), description=places_in_words([place])
        )
        # if torchrun and its store are gone, each rank prints its own place
        with suppress(RuntimeError):
            call = RollCall(_store(), word, nodes, self._mesh.rank)
            found = call.answer(place)
            if found.teller != self._mesh.rank:
                call.wait_until_printed()
        if found.teller == self._mesh.rank:
            words = f"no step has ended for {waited:,.0f} s: {found.description}"
            fix = "look at what these ranks do there; --timeout SECONDS allows for longer steps"
            tell(ExitReason(FAILED, words, fix))
            self._tell(self._step, words)
            with suppress(RuntimeError):
                RollCall(_store(), word, nodes, self._mesh.rank).note_printed()
        for rank in found.silent:
            self._kill(rank)
        os._exit(FAILED)  # the main thread waits in a collective and cannot take an exception

    def _kill(self, rank: int) -> None:
        """Kill a stopped rank of this node, which would not react to torchrun's SIGTERM."""
        _, node, process = self._ranks[rank]
        if node == self._ranks[self._mesh.rank][1]:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _store() -> Any:
    """Return the store of the rendezvous, torchrun's or the first rank's."""
    own, timeout = own_place(), timedelta(seconds=_STORE_SECONDS)
    return dist.TCPStore(own.address, own.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
