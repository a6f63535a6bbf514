"""Lets ranks find each other over the network, and chooses network interfaces.

torchrun keeps one store for all starts. After a restart, torch's own env:// (2.13) reads the
addresses of dead ranks from it, and gloo tries to connect to them until it times out. Here every
start has its own prefix in the store.

gloo listens on the address that the machine's own name resolves to. On Debian and Ubuntu that is
127.0.1.1, which other nodes cannot reach. This file therefore finds the network interface that
leads to the other nodes, for gloo and nccl.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from autopar.runtime.launchers import ProcessPlace, is_loopback
from autopar.runtime.ranks.leaving import MISMATCH, refuse

_RENDEZVOUS_POLL_SECONDS = 0.02
_AGAIN = timedelta(seconds=1)  # a rank waits this long for `done`, then reads its answer again
_RENDEZVOUS_ROOM = "autopar/start"


def store_of(own: ProcessPlace, timeout: timedelta) -> Store:
    """Return the store through which the ranks of one start find each other.

    Exits if they do not meet in time.
    """
    if not own.address:
        refuse(
            f"{own.launcher.name} does not say on which machine the first rank is",
            fix="set MASTER_ADDR to that machine on all ranks: mpirun -x MASTER_ADDR=HOST …",
        )
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            own.address,
            own.port,
            None if is_torchruns else own.world_size,
            is_master=not is_torchruns and own.rank == 0,
            multi_tenant=not is_torchruns,
            wait_for_workers=False,
            timeout=timeout,
        )
        ranks = own.rank, own.world_size
        word = _agreed_word(store, *ranks, timeout) if is_torchruns else "first"
    except (TimeoutError, DistError):
        refuse(
            f"the {own.world_size} ranks have not all met at {own.address}:{own.port} in "
            f"{timeout.total_seconds():,.0f} s",
            fix="check that all nodes are up and reach that address, which MASTER_ADDR and "
            "MASTER_PORT name; --timeout SECONDS allows for a longer start",
        )
    return PrefixStore(f"autopar/{word}", store)


def _agreed_word(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a word that identifies this start, the same on all of its ranks.

    TORCHELASTIC_RESTART_COUNT does not work: nodes whose ranks did not fail count one less.
    Each rank writes a random word. The first rank answers every such word with its own word, until
    every rank of this start has confirmed the answer. Words left by an earlier start are answered
    too, but no rank confirms these answers.
    """
    own = uuid4().hex
    store.set(f"{_RENDEZVOUS_ROOM}/hello/{rank}", own)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _tell_all(store, own, world_size, deadline)
        return own
    while time.monotonic() < deadline:
        store.wait(
            [f"{_RENDEZVOUS_ROOM}/for/{own}"], timedelta(seconds=deadline - time.monotonic())
        )
        word = store.get(f"{_RENDEZVOUS_ROOM}/for/{own}").decode()
        store.set(f"{_RENDEZVOUS_ROOM}/{word}/{rank}", own)
        with suppress(DistStoreError):  # the first rank of an earlier start may have sent it
            store.wait([f"{_RENDEZVOUS_ROOM}/{word}/done"], _AGAIN)
            return word
    raise TimeoutError("ranks are missing")


def _tell_all(store: Store, word: str, world_size: int, deadline: float) -> None:
    """Write the word for all ranks, until all of them have confirmed it."""
    told: set[str] = set()
    store.set(f"{_RENDEZVOUS_ROOM}/{word}/0", word)
    while time.monotonic() < deadline:
        hellos = _of_each(store, f"{_RENDEZVOUS_ROOM}/hello", world_size)
        for own in set(hellos) - told:
            store.set(f"{_RENDEZVOUS_ROOM}/for/{own}", word)
        told.update(hellos)
        are_there = store.check([f"{_RENDEZVOUS_ROOM}/{word}/{rank}" for rank in range(world_size)])
        if are_there and _of_each(store, f"{_RENDEZVOUS_ROOM}/{word}", world_size) == hellos:
            store.set(f"{_RENDEZVOUS_ROOM}/{word}/done", "")
            return
        time.sleep(_RENDEZVOUS_POLL_SECONDS)
    raise TimeoutError("ranks are missing")


def _of_each(store: Store, key: str, world_size: int) -> list[str]:
    """Return every rank's entry, after waiting for missing entries."""
    return [said.decode() for said in store.multi_get([f"{key}/{n}" for n in range(world_size)])]


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ROOM = "autopar/network"
_FIRST, _LOOPBACK, _FAILED = f"{_ROOM}/first", f"{_ROOM}/loopback", f"{_ROOM}/failed"
_POLL_SECONDS, _LOOK_SECONDS = 0.02, 1.0
_MOST_SHOWN = 200  # characters of an error that are printed


@contextmanager
def joining_nodes(store: Store, place: ProcessPlace, timeout: timedelta) -> Iterator[None]:
    """Make groups created inside listen on addresses that other nodes reach.

    If a node cannot be reached, all nodes exit with one message that says what to set.
    """
    if place.local_world_size >= place.world_size:
        yield
        return
    with suppress(OSError):  # no route to the first node, at least by UDP
        _choose_interface(store, place, timeout)
    ended = Event()
    own: Any = store  # torch's stubs lack `clone`: a second connection, for another thread
    Thread(target=_leave_with_others, args=(own.clone(), ended), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        told = f"the nodes cannot join: {error}".partition("\n")[0][:_MOST_SHOWN]
        with suppress(RuntimeError):  # the first node is gone, and the store with it
            told = store.compare_set(_FAILED, "", told).decode()
        _refuse(told)
    finally:
        ended.set()


def _leave_with_others(store: Store, ended: Event) -> None:
    """End this process when another rank could not join, instead of waiting for it."""
    while not ended.wait(_LOOK_SECONDS):
        try:
            told = store.get(_FAILED).decode() if store.check([_FAILED]) else ""
        except RuntimeError:
            told = "the nodes cannot join: the first one has gone"
        if told and not ended.is_set():
            with suppress(SystemExit):
                _refuse(told)
            os._exit(MISMATCH)  # the main thread waits in a collective and cannot take an exception


def _refuse(found: str) -> None:
    used = os.environ.get(GLOO)
    where = f" (the interface here is {used})" if used else ""
    refuse(
        f"{found}{where}",
        fix=f"set {GLOO} and {NCCL} on each node to the interface that leads to the others: "
        "`ip -br address` lists the interfaces",
    )


def _choose_interface(store: Store, place: ProcessPlace, timeout: timedelta) -> None:
    """Set the variables that name the network interface, unless they are set.

    The interface is the one that leads to the first rank. On the first rank's own machine, the
    machine's name may resolve to loopback; the other nodes then write into the store which address
    it has for them. If all nodes see loopback, they are on one machine, and nothing is set.
    """
    first, own = _addresses_towards(place.address, place.port)
    if not is_loopback(own.partition("%")[0]):
        store.set(_FIRST, first)
    else:
        own = _address_seen_by_others(store, place, timeout)
    name = next((name for name, address in _interfaces() if address == own), None)
    if name is not None:
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")  # nccl takes a name without "=" as a prefix


def _addresses_towards(host: str, port: int) -> tuple[str, str]:
    """Return the address of a host, and the local address on the route to it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, place = found[0]
    with socket.socket(family, kind) as one:
        one.connect(place)  # sends nothing
        return str(place[0]), str(one.getsockname()[0])


def _address_seen_by_others(store: Store, place: ProcessPlace, timeout: timedelta) -> str:
    """Return the first node's address as others see it; "" if no node writes one."""
    deadline = time.monotonic() + timeout.total_seconds()
    seeing_loopback = store.add(_LOOPBACK, int(place.local_rank == 0))
    while (
        seeing_loopback < place.nodes and not store.check([_FIRST]) and time.monotonic() < deadline
    ):
        time.sleep(_POLL_SECONDS)
        seeing_loopback = store.add(_LOOPBACK, 0)
    return store.get(_FIRST).decode() if store.check([_FIRST]) else ""


class _Entry(ctypes.Structure):
    """The beginning of C's `struct ifaddrs`: an address of an interface."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
# the position and length of the address in a sockaddr
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield the interfaces of this machine with their addresses (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    library, first = ctypes.CDLL(None), ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        return
    try:
        entry = first
        while entry:
            one, entry = entry.contents, entry.contents.next
            family = ctypes.c_ushort.from_address(one.address).value if one.address else 0
            if family in _PLACES:
                start, size = _PLACES[socket.AddressFamily(family)]
                packed = ctypes.string_at(one.address + start, size)
                yield one.name.decode(), socket.inet_ntop(family, packed)
    finally:
        library.freeifaddrs(first)
