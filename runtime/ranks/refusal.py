"""Ends a script that cannot run as it was started: one message in the place of a traceback."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn, TypeVar

from torch.utils.data import get_worker_info

from autopar.runtime.ranks.leaving import FAILED, MISMATCH, USAGE, Verdict, leave

_Value = TypeVar("_Value")


class OptionParser(argparse.ArgumentParser):
    """Reads the options of a script; what is wrong with them is told once, not by every rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)  # `autopar run` looks for whole names

    def add_argument(self, *flags: Any, **how: Any) -> argparse.Action:
        """Add an option; its default, a setting of the script, is read as what is typed is."""
        return super().add_argument(*flags, **as_typed(how))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        leave(Verdict(USAGE, message, f"{self.prog} --help lists the options"))


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


def refuse(found: str, *, fix: str) -> NoReturn:
    """Say what was found and what to do, and leave; every rank that finds it does."""
    verdict = Verdict(MISMATCH, found, fix)
    if get_worker_info() is not None:
        raise RefusedInWorkerError(str(verdict))
    leave(verdict)


def give_up(found: str, *, fix: str) -> NoReturn:
    """Say why the training cannot go on, and leave; every rank does."""
    leave(Verdict(FAILED, found, fix))


@contextmanager
def refusals_of_workers() -> Iterator[None]:
    """Leave where a worker of the DataLoader that is read inside refuses something."""
    try:
        yield
    except RefusedInWorkerError as error:  # torch has put the worker's traceback before its text
        told = str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()
        found, _, fix = told.removeprefix("error: ").partition("\n  fix: ")
        leave(Verdict(MISMATCH, found, fix))
