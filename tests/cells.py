"""Marks which cells of a table stand for all of them, and how many examples do."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL = "all cells"  # the profile of hypothesis under --all-cells


def cells(every: Iterable[Any], stand: Container[Any]) -> list[Any]:
    """Return parameters of a test; `make test` runs those that stand, `--all-cells` all of them."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in stand else pytest.mark.more_cells,
        )
        for one in every
    ]


def examples(every: int, *, share: int = 2) -> int:
    """Return how many examples a property is tried with.

    With `--all-cells` every one, else one of two, or of `share`.
    """
    return every if settings.get_current_profile_name() == ALL else every // share
