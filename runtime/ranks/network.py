"""How ranks find each other over the network, and what to set where they do not.

Gives the ranks of one start a store of their own, where torchrun keeps one for all starts.

After a restart, torch's own env:// reads the addresses of dead ranks from that store (2.13): gloo
connects to them until it gives up. Here all that the ranks of a start leave begins with a word
that no earlier start has.

Finds the network interface by which other nodes reach this one, for gloo and nccl to listen on.

gloo listens on the address that the name of the machine has there. Debian and Ubuntu give that name
127.0.1.1, which on each other node is that node itself.
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
from ipaddress import ip_address
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from autopar.runtime.ranks.leaving import MISMATCH
from autopar.runtime.ranks.options import number_in
from autopar.runtime.ranks.refusal import refuse

_RENDEZVOUS_POLL_SECONDS = 0.02
_AGAIN = timedelta(seconds=1)  # after which a rank looks whether it was told another word
_RENDEZVOUS_ROOM = "autopar/start"


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
        with suppress(DistStoreError):  # it may be the word of a first rank that has gone
            store.wait([f"{_RENDEZVOUS_ROOM}/{word}/done"], _AGAIN)
            return word
    raise TimeoutError("ranks are missing")


def _tell_all(store: Store, word: str, world_size: int, deadline: float) -> None:
    """Tell all ranks the word, until all of them have it."""
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
    """Return what each rank has said, after waiting for those that have said nothing."""
    return [said.decode() for said in store.multi_get([f"{key}/{n}" for n in range(world_size)])]


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ROOM = "autopar/network"
_FIRST, _LOOPBACK, _FAILED = f"{_ROOM}/first", f"{_ROOM}/loopback", f"{_ROOM}/failed"
_POLL_SECONDS, _LOOK_SECONDS = 0.02, 1.0
_MOST_TOLD = 200  # characters of an error


@contextmanager
def joining_nodes(store: Store, world_size: int, timeout: timedelta) -> Iterator[None]:
    """Have groups that are made inside listen where the other nodes reach them.

    Where some node cannot be reached, all nodes leave with one message that says what to set.
    """
    if number_in("LOCAL_WORLD_SIZE", default=world_size) >= world_size:
        yield
        return
    with suppress(OSError):  # no way leads to the first node, by UDP at least
        _choose_interface(store, timeout)
    ended = Event()
    own: Any = store  # torch's stubs lack `clone`: a connection of its own, for another thread
    Thread(target=_leave_with_others, args=(own.clone(), ended), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        told = f"the nodes cannot join: {error}".partition("\n")[0][:_MOST_TOLD]
        with suppress(RuntimeError):  # the first node has gone, with the store
            told = store.compare_set(_FAILED, "", told).decode()
        _refuse(told)
    finally:
        ended.set()


def _leave_with_others(store: Store, ended: Event) -> None:
    """End this process when another rank could not join: this one would wait for that for long."""
    while not ended.wait(_LOOK_SECONDS):
        try:
            told = store.get(_FAILED).decode() if store.check([_FAILED]) else ""
        except RuntimeError:
            told = "the nodes cannot join: the first one has gone"
        if told and not ended.is_set():
            with suppress(SystemExit):
                _refuse(told)
            os._exit(MISMATCH)  # the main thread waits for a message, and takes no exception


def _refuse(found: str) -> None:
    used = os.environ.get(GLOO)
    where = f" (the interface here is {used})" if used else ""
    refuse(
        f"{found}{where}",
        fix=f"set {GLOO} and {NCCL} on each node to the interface that leads to the others: "
        "`ip -br address` lists the interfaces",
    )


def _choose_interface(store: Store, timeout: timedelta) -> None:
    """Set the variables that name the interface, where nobody has set them.

    It is the one that leads to MASTER_ADDR. On that machine itself, its name may be all that leads
    there, and mean loopback: the other nodes tell which address the name has for them. Where it is
    loopback for all nodes, they are on one machine, and nothing is to be chosen.
    """
    first, own = _addresses_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if not _is_loopback(own):
        store.set(_FIRST, first)
    else:
        own = _told_by_others(store, timeout)
    name = next((name for name, address in _interfaces() if address == own), None)
    if name is not None:
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")  # nccl takes a name alone for the beginning of one


def _addresses_towards(host: str, port: int) -> tuple[str, str]:
    """Return the address of a host, and the one that this machine reaches it from."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, place = found[0]
    with socket.socket(family, kind) as one:
        one.connect(place)  # which sends nothing
        return str(place[0]), str(one.getsockname()[0])


def _told_by_others(store: Store, timeout: timedelta) -> str:
    """Return the address that the first node has for the others; "" where no node tells one."""
    nodes = number_in("GROUP_WORLD_SIZE", default=1)
    deadline = time.monotonic() + timeout.total_seconds()
    alike = store.add(_LOOPBACK, int(number_in("LOCAL_RANK", default=0) == 0))
    while alike < nodes and not store.check([_FIRST]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        alike = store.add(_LOOPBACK, 0)
    return store.get(_FIRST).decode() if store.check([_FIRST]) else ""


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


class _Entry(ctypes.Structure):
    """The beginning of what C calls `struct ifaddrs`: an address of an interface."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # of an address: its first byte, bytes


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield the interfaces of this machine with each of their addresses; on Linux alone."""
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
