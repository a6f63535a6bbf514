"""Says on stderr what a command is at that takes long: the phase, and the line of an import."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType

from autopar.console import tell_note

# Phases by the function that they are in; of several at work, the innermost is told.
_PHASES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("autopar.planner.model.importing", "import_file"): "importing",
        ("autopar.planner.trace", "trace"): "tracing the model",
        ("autopar.planner.axes.infer", "infer_axes"): "finding what the dims mean",
        ("autopar.planner.layers", "find_layers"): "finding the layers",
        ("autopar.planner.plan.search.search", "search"): "searching for the best plan",
        ("autopar.codegen.emit", "emit"): "writing the script",
        ("autopar.runs.launching", "launch"): "",  # the script tells its steps itself
    }
)
_FIRST_SECONDS = 5.0  # imports; other phases take longer as a rule
_PATIENCE = 6  # of other phases, in first times


@contextmanager
def telling_what_takes_long(first_seconds: float = _FIRST_SECONDS) -> Iterator[None]:
    """Say from time to time, each pause twice as long as the last, what this thread is doing."""
    ended, told = threading.Event(), threading.get_ident()
    stderr = sys.stderr  # which a trace sends elsewhere

    def watch() -> None:
        pause, waited = first_seconds, 0.0
        while not ended.wait(pause):
            waited += pause
            frame = sys._current_frames().get(told)
            doing = _doing(frame)
            is_late = waited >= _PATIENCE * first_seconds or doing.startswith("importing")
            if is_late and doing:
                tell_note(f"still {doing} after {waited:.0f} s; Ctrl-C ends it", on=stderr)
                pause *= 2

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()  # a thread that Python's end cuts off may take the process with it


def _doing(frame: FrameType | None) -> str:
    """Return the innermost phase that a stack is in; of an import, where in the model file."""
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
