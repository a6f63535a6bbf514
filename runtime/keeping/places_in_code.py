"""Tells in which line of which function the main thread of this process is."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path

_STANDARD = sysconfig.get_path("stdlib")


def place_of_main_thread() -> str:
    """Return where the main thread is: in the script, and the innermost line of no library."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = traceback.extract_stack(frame)
    own = [one for one in frames if "site-packages" not in one.filename]
    own = [one for one in own if not one.filename.startswith(_STANDARD)] or list(frames)
    script = [one for one in own if Path(one.filename) == Path(sys.argv[0]).resolve()]
    return ", ".join(dict.fromkeys(map(_line, [*script[-1:], own[-1]])))


def _line(frame: traceback.FrameSummary) -> str:
    return f"in {frame.name} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
