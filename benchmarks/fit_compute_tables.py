"""Turns tables of measured kernels into rows, each with the formula that predicts it."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.sheet import find_device
from autopar.planner.costs.kernels.kernels import (
    AttentionShape,
    causal_visible,
    fused_attention_backward_seconds,
    fused_attention_forward_seconds,
    gemm_seconds,
)
from autopar.planner.costs.kernels.rates import Throughput

LAUNCH_SECONDS = 1.5e-6  # between kernels that were queued back to back, as in these benchmarks
BEST_SHAPE_SHEETS = {
    "NVIDIA A100 SXM": "A100-80GB-SXM",
    "NVIDIA A100 PCIe": "A100-80GB-PCIe",
    "NVIDIA H100 SXM": "H100-80GB-SXM",
    "NVIDIA B200 SXM": "B200-180GB-SXM",
    "NVIDIA GB200 SXM": "GB200-186GB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured kernel, and the formula for it."""

    device: str
    kind: str
    seconds: float
    predicted: Callable[[Throughput], float]
    fitted: bool


DTYPE = "bf16"
Sheets = dict[str, Device]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_sheets(folder: Path) -> Sheets:
    """Return the 16-bit data sheets by device name."""
    return {
        row["gpu"]: replace(
            find_device("h100-sxm"),
            architecture=row["arch"],
            peaks=((DTYPE, float(row["bf16_tflops"]) * 1e12),),
            memory_bytes_per_second=float(row["hbm_tbps"]) * 1e12,
            launch_seconds=LAUNCH_SECONDS,
            power_watts=float(row["tdp_w"]),
            multiprocessors=None,
            cache_bytes=None,
        )
        for row in read_rows(folder / "gpus.csv")
        if row["bf16_tflops"]
    }


def read_gemms(folder: Path, random: Random) -> list[Measured]:
    """Return the matrix products; the table's efficiency is 2mnk ÷ (seconds · peak)."""
    measured = []
    for row in read_rows(folder / "ops_gemm_simumax.csv"):
        m, n, k = (int(row[name]) for name in "mnk")
        stored = {"bf16": 2, "fp32": 4}[row["out_dtype"]] * (
            2 if row["accumulate"] == "True" else 1
        )

        def predicted(
            rates: Throughput, m: int = m, n: int = n, k: int = k, s: int = stored
        ) -> float:
            return gemm_seconds(m, n, k, rates=rates, stored_bytes=s, contiguous=8)

        seconds = 2 * m * n * k / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12)
        size = "below 400 us" if seconds < 4e-4 else "400 us and more"
        measured.append(
            Measured(
                device=row["gpu"],
                kind=f"gemm {size}",
                seconds=seconds,
                predicted=predicted,
                fitted=random.random() < 0.5,
            )
        )
    return measured


def read_best_shapes(folder: Path) -> list[Measured]:
    """Return the best-shape matmuls of short runs, which are hardly throttled."""
    measured = []
    for row in read_rows(folder / "ops_mamf.csv"):
        if row["dtype"] != "bf16" or row["gpu"] not in BEST_SHAPE_SHEETS:
            continue
        m, n, k = (int(row[name]) for name in "mnk")

        def predicted(rates: Throughput, m: int = m, n: int = n, k: int = k) -> float:
            return gemm_seconds(m, n, k, rates=rates)

        device = BEST_SHAPE_SHEETS[row["gpu"]]
        seconds = 2 * m * n * k / (float(row["mamf_tflops"]) * 1e12)
        measured.append(
            Measured(
                device=device,
                kind="best-shape gemm",
                seconds=seconds,
                predicted=predicted,
                fitted=device == "A100-80GB-SXM",  # the one that its power does not limit
            )
        )
    return measured


def read_grouped(folder: Path) -> list[Measured]:
    """Return the experts' products, which are not fitted.

    The A100 ran one kernel for all experts, the B200 one for each.
    """
    measured = []
    for row in read_rows(folder / "ops_grouped_gemm_simumax.csv"):
        groups, m, n, k = (int(row[name]) for name in ("num_groups", "m_per_group", "n", "k"))
        gradient = 8 if row["main_grad_dtype"] == "fp32" else 4
        shape = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[row["stage"]]
        stored = gradient if row["stage"] == "bwd_grad_w" else 2
        together, apart = (groups, 1) if "A100" in row["gpu"] else (1, groups)

        def predicted(
            rates: Throughput,
            a: tuple[int, int, int] = shape,
            batch: int = together,
            times: int = apart,
            s: int = stored,
        ) -> float:
            contiguous = a[1] | a[2]
            return times * gemm_seconds(
                *a, rates=rates, batch=batch, stored_bytes=s, contiguous=contiguous
            )

        rate = float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12
        measured.append(
            Measured(
                device=row["gpu"],
                kind=f"experts {row['stage']}",
                seconds=2 * groups * m * n * k / rate,
                predicted=predicted,
                fitted=False,
            )
        )
    return measured


def read_attention(folder: Path, random: Random) -> list[Measured]:
    """Return the causal fused attentions.

    The table counts the FLOPs of the full square, not of its causal half, and 2.5 times as many for
    the backward. Otherwise the A100 could not have efficiencies above 1. With this count, they
    agree with what FlashAttention-2 reports.
    """
    measured = []
    for row in read_rows(folder / "ops_attention_simumax.csv"):
        length, forward = int(row["seq_len"]), row["direction"] == "fwd"
        shape = AttentionShape(
            batch=int(row["batch"]),
            heads=int(row["heads"]),
            kv_heads=int(row["kv_heads"]),
            query_length=length,
            key_length=length,
            head_dim=int(row["qk_head_dim"]),
            value_dim=int(row["v_head_dim"]),
            visible=causal_visible(length, 128),
        )
        formula = fused_attention_forward_seconds if forward else fused_attention_backward_seconds

        def predicted(
            rates: Throughput, f: Callable[..., float] = formula, s: AttentionShape = shape
        ) -> float:
            return f(s, rates=rates)

        flops = 4 * shape.mean_dim * shape.batch * shape.heads * length**2 * (1 if forward else 2.5)
        measured.append(
            Measured(
                device=row["gpu"],
                kind="attention forward" if forward else "attention backward",
                seconds=flops / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12),
                predicted=predicted,
                fitted=random.random() < 0.5,
            )
        )
    return measured
