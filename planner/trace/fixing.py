"""Notes where a model takes the number of rows for a constant, as `len(x)` and loops do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.planner.trace.frames import is_library_file


@contextmanager
def fixing_noted() -> Iterator[list[str]]:
    """Gather `file:line` of the model wherever the exporter gives a symbol of a size one value."""
    places: list[str] = []
    original = ShapeEnv._set_replacement

    def noting(self: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        if value.is_number and not str(symbol).startswith("u"):  # u: sizes that depend on data
            places.append(_caller())
        original(self, symbol, value, *rest)

    with patch.object(ShapeEnv, "_set_replacement", noting):
        yield places


def _caller() -> str:
    """Return `file:line` of the innermost frame of the model; nothing where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
