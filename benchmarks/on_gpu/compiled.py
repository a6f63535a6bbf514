"""Times scripts with compiled layers, with products in float8, and with parts on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.layers import Compile
from autopar.planner.precision import Float8
from autopar.runtime.model.parts import SCALINGS
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.planned import Case
from benchmarks.on_gpu.report import Row
from benchmarks.on_gpu.steps import CASES, TINY, rows_of


def compiled(context: Context) -> Iterator[Row]:
    """Yield rows for each model."""
    yield from rows_of(context, [_compiled(one) for one in _cases(context)], (("script",),))


def in_float8(context: Context) -> Iterator[Row]:
    """Yield rows for each model and each kind of scales that the GPU has units for."""
    if not context.is_gpu:
        return  # CPUs have no units for float8
    chosen = [
        replace(_compiled(one), name=f"{one.name}, float8 {scales}", float8=scales)
        for scales in map(Float8, context.alone(scalings_of_gpu))
        for one in _cases(context)
    ]
    yield from rows_of(context, chosen, (("script",),))


def scalings_of_gpu() -> list[str]:
    """Return the names of the kinds of scales whose products this process's GPU has units for."""
    return [name for name, own in SCALINGS.items() if own.has_units()]


def on_host(context: Context) -> Iterator[Row]:
    """Yield rows for each model: the optimizer on the host, then also the parameters."""
    chosen = [
        replace(one, name=f"{one.name}, {what} on the host", offload=Offload.OPTIMIZER, zero=zero)
        for what, zero in (("optimizer", Zero.NONE), ("parameters", Zero.PARAMETERS))
        for one in _cases(context)
    ]
    yield from rows_of(context, chosen, (("script",),))


def _cases(context: Context) -> tuple[Case, ...]:
    cases = TINY if context.tiny else CASES
    is_any = context.tiny or not context.models
    return tuple(one for one in cases if is_any or one.name in context.models)


def _compiled(case: Case) -> Case:
    return replace(case, name=f"{case.name}, compiled", compile=Compile.LAYERS)
