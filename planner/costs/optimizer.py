"""Turns the state that a rank owns into the seconds of clipping and of its optimizer's step."""

from __future__ import annotations

from autopar.planner.costs.compute import Throughput
from autopar.planner.costs.elementwise import adamw_fused_seconds, memory_seconds

_CLIPPED = 3  # times that a gradient moves: read for the norm, then read and written to be scaled
_FP32_BYTES = 28 + 4 * _CLIPPED  # moved for one fp32 parameter (see adamw_fused_seconds)


def optimizer_seconds(
    parameters: float,
    *,
    gradient_bytes: float,
    copy_bytes: float,
    passes: float,
    rates: Throughput,
    element_seconds: float | None = None,
) -> float:
    """Return the seconds of AdamW on fp32 state with the gradient's norm and clipping.

    seconds = clipping + passes · fused step. `passes` is what copies between precisions and unfused
    kernels add to one fused kernel. `gradient_bytes` and `copy_bytes` are of one parameter. Leaves
    out the launches of many small parameters. Where a profile measured the time per element on fp32
    state, it stands in for all of that, plus the traffic of the copies:

        seconds  =  parameters · (element + element · copy bytes ÷ 40)
    """
    if not parameters:
        return 0.0
    if element_seconds is not None:
        return parameters * element_seconds * (1 + copy_bytes / _FP32_BYTES)
    clipping = memory_seconds(parameters * _CLIPPED * gradient_bytes, rates=rates)
    return clipping + passes * adamw_fused_seconds(
        parameters, state_bytes=4, gradient_bytes=gradient_bytes, copy_bytes=copy_bytes, rates=rates
    )
