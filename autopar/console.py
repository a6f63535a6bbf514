"""Prints results on stdout, and notes, errors and progress on stderr; reads arguments."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from autopar.planner.cluster.toml_reading import did_you_mean
from autopar.planner.errors import AutoparError, InputError
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


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show `doing` on a terminal while the code inside runs; print nothing elsewhere."""
    with status_line(doing):
        yield


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
    """Show `doing` in a line on a terminal; the yielded function replaces the line's text.

    The line appears after `after_seconds`.
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
        ("autopar.codegen.emit", "emit"): "writing the script",
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


# Typer exports only subclasses of UsageError, whose module depends on the version.
_UsageError: Any = typer.BadParameter.__base__


class Command(TyperCommand):
    """A command that reports wrong arguments in autopar's form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the remaining arguments, as typer does."""
        return read_arguments(super().parse_args, ctx, args)


class CommandGroup(TyperGroup):
    """A group that reports an unknown command in autopar's form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments from the command's name on, as typer does."""
        return read_arguments(super().parse_args, ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command with its name and arguments."""
        if args[0] not in self.commands:
            found = f"there is no command {args[0]!r}"
            fix = did_you_mean(args[0], self.commands)
            raise InputError(found, where=ctx.command_path, fix=fix)
        return super().resolve_command(ctx, args)


def read_arguments(
    read: Callable[[Any, list[str]], list[str]], context: Any, arguments: list[str]
) -> list[str]:
    """Parse arguments with typer; its errors become AutoparErrors."""
    _refuse_empty(arguments, context.command_path)
    try:
        return read(context, arguments)
    except _UsageError as error:
        raise _refusal(error, context) from None


def _refuse_empty(arguments: Sequence[str], path: str) -> None:
    """Reject empty arguments, as a shell passes for unset variables."""
    for before, word in pairwise(["", *arguments]):
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if (equals or not option) and not value.strip():
            name = option or (
                before if before.startswith("-") and before != "--" else "an argument"
            )
            raise InputError(f"{name} is empty", where=path, fix="is a shell variable not set?")


def _refusal(error: Any, context: Any) -> InputError:
    """Turn typer's error into an InputError that names the option or the argument."""
    path = context.command_path
    every = f"{path} --help lists what there is"
    if hasattr(error, "possibilities"):
        near = _near(error.option_name, context)
        fix = f"did you mean {near}? " if near else ""
        return InputError(f"there is no option {error.option_name}", where=path, fix=fix + every)
    name = getattr(getattr(error, "param", None), "metavar", None)
    if name is not None and not error.message:
        wanted = [one.metavar for one in context.command.params if one.metavar and one.required]
        return InputError(
            f"{name} is missing",
            where=path,
            expected=error.param.help,
            fix=" ".join([path, *wanted]),
        )
    found = error.format_message().rstrip(".")
    return InputError(found[:1].lower() + found[1:], where=path, fix=every)


def _near(option: str, context: Any) -> str:
    """Return an option with this word in its name, or else a similar option, or ""."""
    known = (name for one in context.command.params for name in (*one.opts, *one.secondary_opts))
    bare = {name.lstrip("-"): name for name in known}
    word = option.lstrip("-")
    having = [name for name in bare if word in name.split("-")]
    near = get_close_matches(word, having or bare, n=1, cutoff=0.0 if having else 0.5)
    return bare[near[0]] if near else ""
