"""Predicts the seconds of attention without a fused kernel: its scores are written to memory."""

from autopar.planner.costs.kernels.kernels import (
    AttentionShape,
    dropout_seconds,
    elementwise_seconds,
    gemm_seconds,
)
from autopar.planner.costs.kernels.rates import Throughput


def unfused_attention_forward_seconds(
    shape: AttentionShape, *, rates: Throughput, dropout: float = 0
) -> float:
    """Return the seconds of bmm, softmax, dropout, bmm, each writing all scores to memory.

    Scale, mask and softmax are one kernel, as in Megatron. A mask saves no work here.
    """
    batch, rows, columns = shape.batch * shape.heads, shape.query_length, shape.key_length
    scores, size = float(batch) * rows * columns, shape.element_bytes
    seconds = gemm_seconds(
        rows,
        columns,
        shape.head_dim,
        rates=rates,
        batch=batch,
        element_bytes=size,
        stored_bytes=size,
    )
    seconds += gemm_seconds(
        rows,
        shape.value_dim,
        columns,
        rates=rates,
        batch=batch,
        element_bytes=size,
        stored_bytes=size,
    )
    seconds += elementwise_seconds(
        scores, element_bytes=size, passes=2, rates=rates, exponentials=1
    )
    if dropout:
        seconds += dropout_seconds(scores, element_bytes=size, rates=rates)
    return seconds


def unfused_attention_backward_seconds(
    shape: AttentionShape, *, rates: Throughput, dropout: float = 0
) -> float:
    """Return the seconds of the backward of bmm, softmax, dropout, bmm.

    dV = Pᵀ·dO and dP = dO·Vᵀ, then dropout and softmax backward, then dQ = dS·K and dK = dSᵀ·Q.
    """
    batch, rows, columns = shape.batch * shape.heads, shape.query_length, shape.key_length
    scores, size = float(batch) * rows * columns, shape.element_bytes
    products = (
        (columns, shape.value_dim, rows),
        (rows, columns, shape.value_dim),
        (rows, shape.head_dim, columns),
        (columns, shape.head_dim, rows),
    )
    seconds = sum(
        gemm_seconds(m, n, k, rates=rates, batch=batch, element_bytes=size, stored_bytes=size)
        for m, n, k in products
    )
    seconds += elementwise_seconds(scores, element_bytes=size, passes=3, rates=rates)
    if dropout:
        seconds += dropout_seconds(scores, element_bytes=size, rates=rates)
    return seconds
