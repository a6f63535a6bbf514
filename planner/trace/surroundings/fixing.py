"""Notes where a model takes the number of rows for a constant, as loops do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.planner.trace.frames import calling_place


@contextmanager
def fixing_noted() -> Iterator[list[str]]:
    """Gather `file:line` of the model wherever the exporter gives a symbol of a size one value."""
    places: list[str] = []
    original = ShapeEnv._set_replacement

    def noting(self: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        if value.is_number and not str(symbol).startswith("u"):  # u: sizes that depend on data
            places.append(calling_place())
        original(self, symbol, value, *rest)

    with patch.object(ShapeEnv, "_set_replacement", noting):
        yield places
