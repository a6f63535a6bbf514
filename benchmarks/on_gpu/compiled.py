"""Times scripts whose plan compiles their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.planner.costs.prediction import Compile
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.report import Row
from benchmarks.on_gpu.steps import CASES, TINY, rows_of


def compiled(context: Context) -> Iterator[Row]:
    """Yield rows for each model."""
    cases = TINY if context.tiny else CASES
    chosen = [
        replace(one, name=f"{one.name}, compiled", compile=Compile.LAYERS)
        for one in cases
        if not context.models or one.name in context.models or context.tiny
    ]
    yield from rows_of(context, chosen, (("script",),))
