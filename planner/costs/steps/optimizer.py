"""Turns the state that a rank owns into the seconds of clipping and of its optimizer's step."""

from __future__ import annotations

from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.kernels.elementwise import adamw_fused_seconds

# Moved for one fp32 parameter: 28 by fused AdamW (adamw_fused_seconds), 12 by clipping, which reads
# the gradient for the norm, and reads and writes it to scale it.
_FP32_BYTES = 40


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

    seconds = passes · fused step. `passes` is what the norm, the scaling of gradients, the copies
    between precisions and unfused kernels add to one fused kernel. It is 1: with the traffic of
    clipping, which scripts do, published runs are predicted worse (median error 5.3 to 6.1 %; 5.5
    % with the other constants fitted anew, on rows held out). Leaves out the launches of many small
    parameters. `gradient_bytes` and `copy_bytes` are of one parameter. Where a profile measured the
    time per element on fp32 state, clipping included, it stands in for all of that, plus the
    traffic of the copies:

        seconds  =  parameters · (element + element · copy bytes ÷ 40)
    """
    if not parameters:
        return 0.0
    if element_seconds is not None:
        return parameters * element_seconds * (1 + copy_bytes / _FP32_BYTES)
    return passes * adamw_fused_seconds(
        parameters, state_bytes=4, gradient_bytes=gradient_bytes, copy_bytes=copy_bytes, rates=rates
    )
