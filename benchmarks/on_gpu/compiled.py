"""Holds scripts whose layers are compiled against the same scripts as they are."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.report import Row
from benchmarks.on_gpu.steps import CASES, TINY, rows_of


def compiled(context: Context) -> Iterator[Row]:
    """Yield rows for each model."""
    cases = TINY if context.tiny else CASES[:2]
    yield from rows_of(context, cases, (("script, compiled",),))
