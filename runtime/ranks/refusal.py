"""Ends a script that cannot run as it was started: one message in the place of a traceback."""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info

from autopar.runtime.ranks.console import say
from autopar.runtime.shown import masked

USAGE = 2  # as autopar's commands have it: bad usage
MISMATCH = 6  # environment and plan do not match
FAILED = 7  # the training itself
RUN_TOKEN = "AUTOPAR_RUN"  # in the environment of all processes of one `autopar run`
VERDICT = "verdict.json"
_Value = TypeVar("_Value")
_PATIENCE = timedelta(seconds=10)


class OptionParser(argparse.ArgumentParser):
    """Reads the options of a script; what is wrong with them is told once, not by every rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)  # `autopar run` looks for whole names

    def add_argument(self, *flags: Any, **how: Any) -> argparse.Action:
        """Add an option; its default, a setting of the script, is read as what is typed is."""
        return super().add_argument(*flags, **as_typed(how))

    def error(self, message: str) -> NoReturn:
        """Say how the script is used and what is wrong, and leave."""
        told = f"{self.format_usage()}{self.prog}: error: {message}"
        _leave(told, Verdict(USAGE, message, f"{self.prog} --help lists the options"))


def as_typed(how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how an option is read: never as an empty text, and a setting as what is typed."""
    if how.get("action", "store") not in ("store", "append"):
        return how
    setting = how.get("default")
    default = str(setting) if isinstance(setting, (str, int, float)) else setting
    # argparse reads defaults that are text
    return {**how, "type": _filled(how.get("type", str)), "default": default}


def _filled(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Refuse an empty text, as a shell makes it of a variable that is not set."""

    @wraps(read)
    def filled(text: str) -> _Value:
        if not text.strip():
            raise argparse.ArgumentTypeError("it is empty; is a shell variable not set?")
        return read(text)

    return filled


class RefusedInWorkerError(Exception):
    """What a worker of a DataLoader refuses: the rank that it reads for tells it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a rank leaves; `autopar run` finds it in the rank's folder of logs."""

    code: int
    found: str
    fix: str

    def __str__(self) -> str:
        return f"error: {self.found}\n  fix: {self.fix}"


def refuse(found: str, *, fix: str) -> NoReturn:
    """Say what was found and what to do, and leave; every rank that finds it does."""
    verdict = Verdict(MISMATCH, found, fix)
    if get_worker_info() is not None:
        raise RefusedInWorkerError(str(verdict))
    _leave(str(verdict), verdict)


def give_up(found: str, *, fix: str) -> NoReturn:
    """Say why the training cannot go on, and leave; every rank does."""
    verdict = Verdict(FAILED, found, fix)
    _leave(str(verdict), verdict)


@contextmanager
def refusals_of_workers() -> Iterator[None]:
    """Leave where a worker of the DataLoader that is read inside refuses something."""
    try:
        yield
    except RefusedInWorkerError as error:  # torch has put the worker's traceback before its text
        told = str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()
        found, _, fix = told.removeprefix("error: ").partition("\n  fix: ")
        _leave(told, Verdict(MISMATCH, found, fix))


def _leave(message: str, verdict: Verdict) -> NoReturn:
    note_verdict(verdict)
    store, key = _store_of_torchrun(), _key_of(message)
    if store is None or not _another_tells(store, key):
        say(message)
        if store is not None:
            with suppress(RuntimeError):  # torchrun has gone
                store.set(_told(key), "")
    _leave_groups()
    raise SystemExit(verdict.code)


def note_verdict(verdict: Verdict) -> None:
    """Leave beside the logs of this rank why it leaves, if `autopar run` has started it."""
    reply = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if RUN_TOKEN not in os.environ or not reply:
        return
    with suppress(OSError):
        place = Path(reply).with_name(VERDICT)
        text = json.dumps({"time": time.time(), **asdict(verdict)})
        place.write_text(masked(text), encoding="utf-8")


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
