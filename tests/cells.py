"""Marks which cells of a table stand for all of them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cells(every: Iterable[Any], stand: Container[Any]) -> list[Any]:
    """Return parameters of a test; `make test` runs those that stand, `--all-cells` all of them."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in stand else pytest.mark.more_cells,
        )
        for one in every
    ]
