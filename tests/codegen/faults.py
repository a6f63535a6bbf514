"""Faults that the ranks of a script meet on purpose: one for each start, in the order of FAULTS.

A script that imports this gets the fault of its start, and knows bucket://. Each is made in the
functions that a training calls, so that it strikes at the same place every time.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from autopar.runtime.checkpointing import finding as step_folders
from autopar.runtime.checkpointing import keeper, signals, watch, writing
from autopar.runtime.ranks import leaving
from autopar.runtime.ranks.locations import Location, write
from tests import bucket

del bucket  # which has registered bucket://
RANK = int(os.environ.get("RANK", "0"))
_FEW_BYTES = 4096


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(place: Any, name: str, act: Callable[..., Any], *, rank: int) -> None:
    """Have a rank do something each time before it calls a function."""
    called = getattr(place, name)

    def acting(*args: Any, **named: Any) -> Any:
        if rank == RANK:
            act(*args)
        return called(*args, **named)

    setattr(place, name, acting)


def at_step(number: int, act: Callable[[], None], *, rank: int = 1) -> None:
    """Have a rank do something in a step, when its optimizer has stepped."""

    def acting(_: Any, step: int) -> None:
        if step == number:
            act()

    before(keeper.Keeper, "after", acting, rank=rank)


def leaves_half_a_file(path: Location, *_: Any) -> None:
    write(path, [b"\0" * _FEW_BYTES])
    die()


def limit_files(size_bytes: int) -> None:
    """Let no file grow beyond a size: what a full disk does, and needs no disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def finds_the_disk_full() -> None:
    before(writing, "write_tensors", lambda *_: limit_files(_FEW_BYTES), rank=1)
    at_step(7, die)


def damages_what_is_kept(folder: Location, *_: Any) -> None:
    """Flip a byte of step 6 as soon as it is whole."""
    shard = folder / "step-6" / "rank-00001.safetensors"
    if shard.exists():
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        write(shard, [bytes(content)])
        die()


def ask_to_stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "a rank dies": lambda: at_step(5, die),
        "a write has begun": lambda: before(writing, "write_tensors", lambda *_: die(), rank=1),
        "half a file": lambda: before(writing, "write_tensors", leaves_half_a_file, rank=1),
        "no manifest": lambda: before(writing, "_complete_on_first", lambda *_: die(), rank=0),
        "no name yet": lambda: before(step_folders, "_settle", lambda *_: die(), rank=0),
        "the disk is full": finds_the_disk_full,
        "a byte is flipped": lambda: before(
            keeper, "remove_old_checkpoints", damages_what_is_kept, rank=0
        ),
        "asked while it writes": lambda: before(writing, "write_tensors", ask_to_stop, rank=1),
        "asked in a step": lambda: at_step(10, ask_to_stop),
        "stopped": lambda: at_step(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        "asleep": lambda: at_step(3, lambda: time.sleep(1000)),
        "none": lambda: None,
    }
)

signals._CHECK_SECONDS = 0.0  # in each step: these are few
# Two ranks of one machine need less time to write and to read where they are.
leaving._PATIENCE_SECONDS = watch._LEAST_SECONDS = 2.0
_named = os.environ["FAULTS"].split(",")
FAULTS[_named[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(_named) - 1)]]()
