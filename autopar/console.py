"""Where text meets the terminal: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from autopar.planner.errors import AutoparError
from autopar.runtime.shown import masked, plain


class PlainConsole(Console):
    """Prints names and messages of others as they are: no markup, no orders, no passwords."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text as it is printed, so that tables leave room for all of it."""
        return super().render_str(plain(text), **settings)

    def render(self, *given: Any, **settings: Any) -> Iterable[Segment]:
        """Yield the segments of something, with control characters spelled out."""
        for segment in super().render(*given, **settings):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def results() -> Console:
    """Return the console for results; without a terminal it is wide and has no colour."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # it may have been closed
    return PlainConsole(width=None if is_terminal else _FILE_WIDTH)


_FILE_WIDTH = 120


def print_json(data: object, *, indent: int | None = 2) -> None:
    """Print data for programs; passwords in URLs are left out here, too."""
    print(masked(json.dumps(data, indent=indent)))


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Say on a terminal what is being done; elsewhere say nothing."""
    console = PlainConsole(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(doing):
        yield


def tell_note(text: str, *, on: TextIO | None = None) -> None:
    """Print on stderr, or where it led before, what a person should know, if nothing is wrong."""
    console = PlainConsole(stderr=True, file=on, soft_wrap=True)
    console.print(Text.assemble(("note: ", "bold"), plain(text)))


def tell_error(error: AutoparError) -> None:
    """Print an error on stderr: what was found, where, what was expected, what to do."""
    console = PlainConsole(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), _short(error.found)))
    for label, text in (("at", error.where), ("expected", error.expected), ("fix", error.fix)):
        if text:
            console.print(Text.assemble((f"  {label}: ", "bold"), _short(text)))


def _short(text: str) -> str:
    """Return a text without the middle of what nobody reads to its end."""
    text, half = plain(text), _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"


_MOST_CHARACTERS = 4_000
