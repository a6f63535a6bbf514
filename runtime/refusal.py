"""Ends a script that cannot run as it was started: one message in the place of a traceback."""

import argparse
import hashlib
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

USAGE = 2  # as autopar's commands have it: bad usage
MISMATCH = 6  # environment and plan do not match
_PATIENCE = timedelta(seconds=10)


class OptionParser(argparse.ArgumentParser):
    """Reads the options of a script; what is wrong with them is told once, not by every rank."""

    def error(self, message: str) -> NoReturn:
        """Say how the script is used and what is wrong, and leave."""
        _leave(f"{self.format_usage()}{self.prog}: error: {message}", USAGE)


def refuse(found: str, *, fix: str) -> NoReturn:
    """Say what was found and what to do, and leave; every rank that finds it does."""
    _leave(f"error: {found}\n  fix: {fix}", MISMATCH)


def _leave(message: str, code: int) -> NoReturn:
    store, key = _store_of_torchrun(), _key_of(message)
    if store is None or not _another_tells(store, key):
        print(message, file=sys.stderr, flush=True)
        if store is not None:
            with suppress(RuntimeError):  # torchrun has gone
                store.set(_told(key), "")
    raise SystemExit(code)


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
