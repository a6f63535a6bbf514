"""Where text meets the terminal: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from autopar.planner.errors import AutoparError


def results() -> Console:
    """Return the console for results; without a terminal it is wide and has no colour."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # it may have been closed
    return Console(highlight=False, width=None if is_terminal else _FILE_WIDTH)


_FILE_WIDTH = 120


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Say on a terminal what is being done; elsewhere say nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(doing):
        yield


def tell_note(text: str) -> None:
    """Print on stderr what a person should know, though nothing is wrong."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("note: ", "bold"), text))


def tell_error(error: AutoparError) -> None:
    """Print an error on stderr: what was found, where, what was expected, what to do."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), error.found))
    for label, text in (("at", error.where), ("expected", error.expected), ("fix", error.fix)):
        if text:
            console.print(Text.assemble((f"  {label}: ", "bold"), text))
