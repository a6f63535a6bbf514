"""Ends a script that cannot run as it was started: one message in the place of a traceback."""

import argparse
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info

from autopar.runtime.ranks.console import say

USAGE = 2  # as autopar's commands have it: bad usage
MISMATCH = 6  # environment and plan do not match
FAILED = 7  # the training itself
_Number = TypeVar("_Number", int, float)
_PATIENCE = timedelta(seconds=10)


class OptionParser(argparse.ArgumentParser):
    """Reads the options of a script; what is wrong with them is told once, not by every rank."""

    def add_argument(self, *flags: Any, **how: Any) -> argparse.Action:
        """Add an option; its default, a setting of the script, is read as what is typed is."""
        if how.get("type") is not None and how.get("default") is not None:
            how["default"] = str(how["default"])  # argparse reads defaults that are text
        return super().add_argument(*flags, **how)

    def error(self, message: str) -> NoReturn:
        """Say how the script is used and what is wrong, and leave."""
        _leave(f"{self.format_usage()}{self.prog}: error: {message}", USAGE)


def from_zero(text: str) -> int:
    """Read a whole number of an option that counts from 0."""
    return _read(text, int, least=0)


def from_one(text: str) -> int:
    """Read a whole number of an option that counts from 1."""
    return _read(text, int, least=1)


def norm(text: str) -> float:
    """Read a norm, which is never below 0: clipped to -1, gradients would point the other way."""
    return _read(text, float, least=0)


def _read(text: str, kind: type[_Number], *, least: int) -> _Number:
    with suppress(ValueError):
        found = kind(text)
        if found >= least:  # which nan is not
            return found
    what = "whole number" if kind is int else "number"
    raise argparse.ArgumentTypeError(f"{text} is not a {what} of {least} or more")


class RefusedInWorkerError(Exception):
    """What a worker of a DataLoader refuses: the rank that it reads for tells it."""


def refuse(found: str, *, fix: str) -> NoReturn:
    """Say what was found and what to do, and leave; every rank that finds it does."""
    message = f"error: {found}\n  fix: {fix}"
    if get_worker_info() is not None:
        raise RefusedInWorkerError(message)
    _leave(message, MISMATCH)


def give_up(found: str, *, fix: str) -> NoReturn:
    """Say why the training cannot go on, and leave; every rank does."""
    _leave(f"error: {found}\n  fix: {fix}", FAILED)


@contextmanager
def refusals_of_workers() -> Iterator[None]:
    """Leave where a worker of the DataLoader that is read inside refuses something."""
    try:
        yield
    except RefusedInWorkerError as error:  # torch has put the worker's traceback before its text
        _leave(str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip(), MISMATCH)


def _leave(message: str, code: int) -> NoReturn:
    store, key = _store_of_torchrun(), _key_of(message)
    if store is None or not _another_tells(store, key):
        say(message)
        if store is not None:
            with suppress(RuntimeError):  # torchrun has gone
                store.set(_told(key), "")
    _leave_groups()
    raise SystemExit(code)


def _leave_groups() -> None:
    """Give up the groups of nccl: at its exit, a process would wait in them for what never comes.

    torch's own destroy_process_group waits for all ranks, which may not know that this one leaves.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        with suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()


def _another_tells(store: Any, key: str) -> bool:
    """Whether another rank of this node says the same, and has done so.

    torchrun ends all ranks as soon as one has left: none may leave before the message is out.
    """
    try:
        if store.add(key, 1) == 1:
            return False
        store.wait([_told(key)], _PATIENCE)
    except RuntimeError:  # torchrun has gone, or the other rank before it could tell
        return False
    return True


def _store_of_torchrun() -> Any:
    """Return what torchrun keeps for its ranks, there before they join and after; else None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(RuntimeError):
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=_PATIENCE
        )
    return None


def _key_of(message: str) -> str:
    """Return a name for a message on the console of a node, in one start of the ranks."""
    node, start = (os.environ.get(name) for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    return f"autopar/{start}/{node}/{hashlib.sha256(message.encode()).hexdigest()}"


def _told(key: str) -> str:
    return f"{key}/told"
