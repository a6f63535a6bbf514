"""Ends a script that cannot run as it was started, with one message instead of a traceback."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn, TypeVar

from torch.utils.data import get_worker_info

from autopar.runtime.launchers import ProcessPlace, UnknownPlaceError, own_place
from autopar.runtime.ranks.leaving import FAILED, MISMATCH, USAGE, ExitReason, leave

_Value = TypeVar("_Value")


class OptionParser(argparse.ArgumentParser):
    """Parses the options of a script; an error is printed once, not by every rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)  # `autopar run` searches for whole names

    def add_argument(self, *flags: Any, **how: Any) -> argparse.Action:
        """Add an option; its default is parsed like a typed value."""
        return super().add_argument(*flags, **as_typed(how))

    def error(self, message: str) -> NoReturn:
        """Print an error, and exit."""
        leave(ExitReason(USAGE, message, f"{self.prog} --help lists the options"))


def as_typed(how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return argparse settings that parse a default like a typed value, and reject ""."""
    if how.get("action", "store") not in ("store", "append"):
        return how
    setting = how.get("default")
    default = str(setting) if isinstance(setting, (str, int, float)) else setting
    # argparse parses defaults that are strings
    return {**how, "type": _filled(how.get("type", str)), "default": default}


def _filled(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return a parser that rejects an empty value, as a shell passes for an unset variable."""

    @wraps(read)
    def filled(text: str) -> _Value:
        if not text.strip():
            raise argparse.ArgumentTypeError("it is empty; is a shell variable not set?")
        return read(text)

    return filled


class RefusedInWorkerError(Exception):
    """Raised by `refuse` in a DataLoader worker; the worker's rank prints the message and exits."""


def refuse(found: str, *, fix: str) -> NoReturn:
    """Print a problem and its fix, and end all ranks; in a DataLoader worker, raise an error."""
    verdict = ExitReason(MISMATCH, found, fix)
    if get_worker_info() is not None:
        raise RefusedInWorkerError(str(verdict))
    leave(verdict)


def known_place() -> ProcessPlace:
    """Return this process's place among the ranks; exit if the environment does not tell it."""
    try:
        return own_place()
    except UnknownPlaceError as error:
        refuse(str(error), fix=error.fix)


def give_up(found: str, *, fix: str) -> NoReturn:
    """Print why the training cannot go on, and end all ranks."""
    leave(ExitReason(FAILED, found, fix))


@contextmanager
def refusals_of_workers() -> Iterator[None]:
    """Exit if a DataLoader worker used inside raises RefusedInWorkerError."""
    try:
        yield
    except RefusedInWorkerError as error:  # torch has put the worker's traceback before the text
        told = str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()
        found, _, fix = told.removeprefix("error: ").partition("\n  fix: ")
        leave(ExitReason(MISMATCH, found, fix))
