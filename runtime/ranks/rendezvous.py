"""Gives the ranks of one start a store of their own, where torchrun keeps one for all starts.

After a restart, torch's own env:// reads the addresses of dead ranks from that store (2.13): gloo
connects to them until it gives up. Here all that the ranks of a start leave begins with a word
that no earlier start has.
"""

from __future__ import annotations

import os
import time
from hashlib import sha256
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

_POLL_SECONDS = 0.02
_ROUND, _HELLO, _SEEN, _DONE = (f"autopar/{key}" for key in ("round", "hello", "seen", "done"))


def store_of(rank: int, world_size: int) -> Store:
    """Return what the ranks that torchrun has started together find each other by."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        host,
        port,
        None if is_torchruns else world_size,
        is_master=not is_torchruns and rank == 0,
        multi_tenant=not is_torchruns,
        wait_for_workers=False,
        timeout=default_pg_timeout,
    )
    word = _agreed_word(store, rank, world_size) if is_torchruns else "first"
    return PrefixStore(f"autopar/{word}", store)


def _agreed_word(store: Store, rank: int, world_size: int) -> str:
    """Return a word that the ranks of this start have, and those of no earlier one.

    TORCHELASTIC_RESTART_COUNT would not do: nodes whose own ranks did not fail count one less. Each
    rank says hello by a word of its own. The first one tells all hellos that it finds, again and
    again until every rank has found its own among them.
    """
    own = uuid4().hex
    store.set(f"{_HELLO}/{rank}", own)
    deadline = time.monotonic() + default_pg_timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0:
            store.set(_ROUND, ",".join(_of_each(store, _HELLO, world_size)))
        told = store.get(_ROUND).decode()  # may be that of an earlier start
        if own in told.split(","):
            word = sha256(told.encode()).hexdigest()[:16]
            store.set(f"{_SEEN}/{rank}", word)
            if rank == 0 and _have_all_seen(store, word, world_size):
                store.set(f"{_DONE}/{word}", "")
            if store.check([f"{_DONE}/{word}"]):
                return word
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("the ranks that torchrun has started do not find each other")


def _have_all_seen(store: Store, word: str, world_size: int) -> bool:
    is_there = store.check([f"{_SEEN}/{rank}" for rank in range(world_size)])
    return is_there and set(_of_each(store, _SEEN, world_size)) == {word}


def _of_each(store: Store, key: str, world_size: int) -> list[str]:
    """Return what each rank has said, after waiting for those that have said nothing."""
    return [said.decode() for said in store.multi_get([f"{key}/{n}" for n in range(world_size)])]
