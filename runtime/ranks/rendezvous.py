"""Gives the ranks of one start a store of their own, where torchrun keeps one for all starts.

After a restart, torch's own env:// reads the addresses of dead ranks from that store (2.13): gloo
connects to them until it gives up. Here all that the ranks of a start leave begins with a word
that no earlier start has.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from autopar.runtime.ranks.refusal import refuse

_POLL_SECONDS = 0.02
_AGAIN = timedelta(seconds=1)  # after which a rank looks whether it was told another word
_ROOM = "autopar/start"


def store_of(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return what the ranks that torchrun has started together find each other by.

    Leaves where they do not find each other in time.
    """
    try:
        return _store_of(rank, world_size, timeout)
    except (TimeoutError, DistError):
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        refuse(
            f"the {world_size} ranks have not all met at {place} in "
            f"{timeout.total_seconds():,.0f} s",
            fix="look whether all nodes are up and reach that address, which MASTER_ADDR and "
            "MASTER_PORT name; --timeout SECONDS allows for a longer start",
        )


def _store_of(rank: int, world_size: int, timeout: timedelta) -> Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        host,
        port,
        None if is_torchruns else world_size,
        is_master=not is_torchruns and rank == 0,
        multi_tenant=not is_torchruns,
        wait_for_workers=False,
        timeout=timeout,
    )
    word = _agreed_word(store, rank, world_size, timeout) if is_torchruns else "first"
    return PrefixStore(f"autopar/{word}", store)


def _agreed_word(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a word that the ranks of this start have, and those of no earlier one.

    TORCHELASTIC_RESTART_COUNT would not do: nodes whose own ranks did not fail count one less. Each
    rank says hello by a word of its own. The first one tells its word to every hello that it finds,
    until every rank whose hello stands there has said that it has the word. What an earlier start
    has left is told the word too, and has nobody who says so.
    """
    own = uuid4().hex
    store.set(f"{_ROOM}/hello/{rank}", own)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _tell_all(store, own, world_size, deadline)
        return own
    while time.monotonic() < deadline:
        store.wait([f"{_ROOM}/for/{own}"], timedelta(seconds=deadline - time.monotonic()))
        word = store.get(f"{_ROOM}/for/{own}").decode()
        store.set(f"{_ROOM}/{word}/{rank}", own)
        with suppress(DistStoreError):  # it may be the word of a first rank that has gone
            store.wait([f"{_ROOM}/{word}/done"], _AGAIN)
            return word
    raise TimeoutError("ranks are missing")


def _tell_all(store: Store, word: str, world_size: int, deadline: float) -> None:
    """Tell all ranks the word, until all of them have it."""
    told: set[str] = set()
    store.set(f"{_ROOM}/{word}/0", word)
    while time.monotonic() < deadline:
        hellos = _of_each(store, f"{_ROOM}/hello", world_size)
        for own in set(hellos) - told:
            store.set(f"{_ROOM}/for/{own}", word)
        told.update(hellos)
        are_there = store.check([f"{_ROOM}/{word}/{rank}" for rank in range(world_size)])
        if are_there and _of_each(store, f"{_ROOM}/{word}", world_size) == hellos:
            store.set(f"{_ROOM}/{word}/done", "")
            return
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("ranks are missing")


def _of_each(store: Store, key: str, world_size: int) -> list[str]:
    """Return what each rank has said, after waiting for those that have said nothing."""
    return [said.decode() for said in store.multi_get([f"{key}/{n}" for n in range(world_size)])]
