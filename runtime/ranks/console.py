"""Puts lines on a terminal, and below them a bar that the next line takes the place of."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta
from typing import TextIO

from autopar.runtime.shown import plain

_ERASE = "\x1b[K"  # what is right of the cursor
_BAR = 30  # characters


def say(text: object, to: TextIO | None = None) -> None:
    """Print a line to stderr, or to another stream; a bar that stands there is erased.

    Names of others in it give the terminal no orders, and passwords in URLs are left out.
    """
    stream = sys.stderr if to is None else to
    # At once: print writes the end of the line apart, and ranks share the console.
    stream.write(f"{_ERASE if is_terminal(stream) else ''}{plain(str(text))}\n")
    stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """Whether lines of a stream can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def draw_bar(done: int, whole: int, seconds_left: float) -> None:
    """Show on stdout how much is done; the cursor rests at the start, for the next line."""
    filled = _BAR * done // whole
    text = f"step {done:>6}   {'━' * filled}{'─' * (_BAR - filled)} {done / whole:4.0%}"
    text += f"   {timedelta(seconds=round(seconds_left))} left"
    width = shutil.get_terminal_size().columns - 1  # a line that is wrapped cannot be written over
    sys.stdout.write(f"{_ERASE}{text[:width]}\r")
    sys.stdout.flush()
