"""Makes rates for tests: a device of round numbers, and real ones from their sheets."""

from dataclasses import replace
from typing import Any

from autopar.planner.cluster.sheet import find_device
from autopar.planner.costs.kernels.kernels import AttentionShape
from autopar.planner.costs.kernels.rates import (
    BatchNormConstants,
    NormConstants,
    Throughput,
    Tile,
    read_compute_constants,
    throughput,
)


def real_rates(*, peak: float = 312e12, dtype: str = "bf16", **changes: Any) -> Throughput:
    """Return the rates of an A100-PCIe with the shipped constants, changed as asked."""
    a100 = replace(
        find_device("a100-80gb-pcie"),
        peaks=(("bf16", peak), ("fp8", 2 * peak)),
        launch_seconds=2e-6,
        power_watts=300,
        multiprocessors=None,
        cache_bytes=None,
    )
    return throughput(replace(a100, **changes), dtype)


def round_rates(**changes: Any) -> Throughput:
    """Return 100 multiprocessors of 1 TFLOP/s, half sustained, and 1 TB/s, half reached.

    One tile of 100 × 100 takes 2 · 100 · 100 FLOPs ÷ 1 TFLOP/s = 20 ns per unit of depth.
    """
    facts = replace(
        real_rates().architecture,
        attention_forward=0.5,
        attention_backward=0.25,
        forward_tail_rows=0,
        backward_tail_rows=0,
        softmax_dims=0,
        query_block=1,
    )
    rates = Throughput(
        peak_flops_per_second=100e12,
        sustained_flops_per_second=50e12,
        sheet_bytes_per_second=1e12,
        stream_bytes_per_second=0.5e12,
        cache_bytes=1_000_000,
        exponentials_per_second=1e12,
        launch_seconds=1e-6,
        multiprocessors=100,
        tiles=(Tile(rows=100, columns=100, seconds_per_depth=20e-9, balance_seconds=1.0),),
        wave_seconds=3e-6,
        store_exposed=0.5,
        alignment=((16, 1.0), (8, 0.5), (2, 0.25)),
        access=read_compute_constants().access["gpu"],
        norm=NormConstants(
            forward=0.5, backward=0.8, row_seconds=1e-7, column_seconds=4e-9, plane_blocks=4
        ),
        native_batch_norm=BatchNormConstants(
            statistics=1e-9, gradient=2e-9, plane=0.3e-6, apply=0.4, backward=0.5
        ),
        library_batch_norm=read_compute_constants().batch_norm["library"],
        architecture=facts,
        attention=read_compute_constants().attention,
    )
    return replace(rates, **changes)


def attention(length: int = 4096, heads: int = 32, **changes: Any) -> AttentionShape:
    """Return attention over one sequence."""
    shape = AttentionShape(
        batch=1,
        heads=heads,
        kv_heads=heads,
        query_length=length,
        key_length=length,
        head_dim=128,
        value_dim=128,
    )
    return replace(shape, **changes)
