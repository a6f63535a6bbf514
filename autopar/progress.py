"""Says on a terminal what a long search is doing; elsewhere says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autopar.console import PlainConsole


@contextmanager
def reported(doing: str) -> Iterator[Callable[[str], None]]:
    """Give a function that replaces the line which says what is being done."""
    console = PlainConsole(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(doing) as status:
        yield lambda text: status.update(text)
