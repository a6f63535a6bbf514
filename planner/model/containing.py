"""Keeps what the code of a model file does to the process from what autopar does after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from autopar.planner.errors import InputError


@contextmanager
def contained(path: Path) -> Iterator[None]:
    """Send prints to stderr, refuse os._exit, end forks where they come out, keep the folder."""
    process, folder, leave = os.getpid(), _folder(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # one that multiprocessing has started
            leave(status)
        raise InputError(
            f"the model file ends the process (os._exit({status}))",
            where=str(path),
            fix='put what should only run as a script under `if __name__ == "__main__":`',
        )

    try:
        with redirect_stdout(sys.stderr), patch.object(os, "_exit", refuse):
            yield
    finally:
        if os.getpid() != process:  # os.fork: the command goes on once, in the process that began
            leave(0)
        if folder is not None and folder != _folder():
            os.chdir(folder)


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - as text, to be compared
    except FileNotFoundError:
        return None  # it was removed
