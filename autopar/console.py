"""Prints results on stdout, and notes, errors and progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from autopar.planner.errors import AutoparError
from autopar.runtime.texts import masked, plain


class PlainConsole(Console):
    """A console that ignores markup, spells out control characters, and hides passwords."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text as it will be printed, so that tables reserve its width."""
        return super().render_str(plain(text), **settings)

    def render(self, *given: Any, **settings: Any) -> Iterable[Segment]:
        """Yield the segments of a renderable, with control characters spelled out."""
        for segment in super().render(*given, **settings):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def results() -> Console:
    """Return the console for results; without a terminal it has a fixed width and no colour."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # stdout may be closed
    return PlainConsole(width=None if is_terminal else _FILE_WIDTH)


_FILE_WIDTH = 120


def print_json(data: object, *, indent: int | None = 2) -> None:
    """Print data as JSON, without passwords in URLs."""
    print(masked(json.dumps(data, indent=indent)))


def print_note(text: str, *, on: TextIO | None = None) -> None:
    """Print a note on stderr, or on the given stream."""
    console = PlainConsole(stderr=True, file=on, soft_wrap=True)
    console.print(Text.assemble(("note: ", "bold"), plain(text)))


def print_error(error: AutoparError) -> None:
    """Print an error on stderr: the finding, its place, the expectation, and the fix."""
    console = PlainConsole(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), _short(error.found)))
    for label, text in (("at", error.where), ("expected", error.expected), ("fix", error.fix)):
        if text:
            console.print(Text.assemble((f"  {label}: ", "bold"), _short(text)))


def _short(text: str) -> str:
    """Return a long text without its middle."""
    text, half = plain(text), _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"


_MOST_CHARACTERS = 4_000


@contextmanager
def status_line(doing: str, *, after_seconds: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Show `doing` on a terminal while the code inside runs; print nothing elsewhere.

    The line appears after `after_seconds`. The yielded function replaces its text.
    """
    console = PlainConsole(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    status = console.status(doing)
    showing = threading.Timer(after_seconds, status.start)
    showing.daemon = True
    showing.start()
    try:
        yield status.update
    finally:
        showing.cancel()
        showing.join()
        status.stop()


# Phases, by the function on the stack; the innermost one is shown.
_PHASES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("autopar.planner.model.model_file", "import_file"): "importing",
        ("autopar.planner.trace", "trace"): "tracing the model",
        ("autopar.planner.axes.infer", "infer_axes"): "finding what the dims mean",
        ("autopar.planner.layers", "find_layers"): "finding the layers",
        ("autopar.planner.plan.search.search", "search"): "searching for the best plan",
        ("autopar.codegen.emit", "emit_with_notes"): "writing the script",
        ("autopar.codegen.proof.verification", "verify"): "training with the script to verify it",
        ("autopar.runs.launching", "launch"): "",  # the script prints its own steps
    }
)
_FIRST_SECONDS = 10.0  # until the first note on an import
_OTHERS_FACTOR = 3  # times _FIRST_SECONDS, until the first note on another phase


@contextmanager
def noting_slow_phases(first_seconds: float = _FIRST_SECONDS) -> Iterator[None]:
    """Print notes on this thread's phase if it takes long; after each note the pause doubles."""
    ended, watched = threading.Event(), threading.get_ident()
    stderr = sys.stderr  # tracing redirects stderr

    def watch() -> None:
        pause, waited = first_seconds, 0.0
        while not ended.wait(pause):
            waited += pause
            frame = sys._current_frames().get(watched)
            doing = _doing(frame)
            is_late = waited >= _OTHERS_FACTOR * first_seconds or doing.startswith("importing")
            if is_late and doing:
                print_note(f"still {doing} after {waited:.0f} s; Ctrl-C ends it", on=stderr)
                pause *= 2

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()  # a thread that still runs at exit may crash the process


def _doing(frame: FrameType | None) -> str:
    """Return the innermost phase on a stack; for an import, also the line of the model file."""
    inside: list[FrameType] = []
    while frame is not None:
        phase = _PHASES.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if phase == "importing":
            path = Path(frame.f_locals["path"])
            lines = [one.f_lineno for one in inside if one.f_code.co_filename == str(path)]
            return f"{phase} {path.name}" + (f", at line {lines[0]}" if lines else "")
        if phase is not None:
            return phase
        inside.append(frame)
        frame = frame.f_back
    return "at work"
