"""Fits planner/costs/kernels/efficiency.toml to measured kernels; prints how far formulas are off.

    python -m benchmarks.fit_compute TABLE_DIR

TABLE_DIR holds ops_gemm_simumax.csv, ops_grouped_gemm_simumax.csv, ops_attention_simumax.csv,
ops_mamf.csv, ops_comm_fit_simumax.csv and gpus.csv. A random half of the rows is fitted; the other
half is only predicted. Constants fitted on all rows are printed, to be copied by a person.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from autopar.planner.costs.kernels.rates import (
    Architecture,
    ComputeConstants,
    read_compute_constants,
    throughput,
)
from benchmarks.fit_compute_tables import (
    DTYPE,
    Measured,
    Sheets,
    read_attention,
    read_best_shapes,
    read_gemms,
    read_grouped,
    read_rows,
    read_sheets,
)

ARCHITECTURES = ("ampere", "blackwell")  # those with tables
GEMM_KNOBS = ("issue_fraction", "half_tile", "wave_seconds", "store_exposed", "balance_traffic")
Point = tuple[float, ...]


def relative_errors(
    rows: Sequence[Measured], sheets: Sheets, constants: ComputeConstants
) -> list[float]:
    """Return predicted ÷ measured − 1 of each row."""
    devices = {row.device for row in rows}
    rates = {device: throughput(sheets[device], DTYPE, constants) for device in devices}
    return [row.predicted(rates[row.device]) / row.seconds - 1 for row in rows]


def loss(rows: Sequence[Measured], sheets: Sheets, constants: ComputeConstants) -> float:
    """Return Σ over devices of the mean |log error|.

    Errors are not squared, so that rows of a throttled device do not dominate.
    """
    errors = relative_errors(rows, sheets, constants)
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        groups.setdefault(row.device, []).append(abs(log(1 + error)))
    weights = {"A100-80GB-SXM": 0.05}  # its only row is from another benchmark
    return sum(weights.get(device, 1.0) * fmean(values) for device, values in groups.items())


def set_gemm(constants: ComputeConstants, point: Point) -> ComputeConstants:
    """Set the constants of matrix products to the values of `point`."""
    knobs: dict[str, Any] = dict(zip(GEMM_KNOBS, point, strict=False))
    gemm = replace(constants.gemm["gpu"], **knobs)
    joules = dict(zip(ARCHITECTURES, point[len(GEMM_KNOBS) :], strict=True))
    return replace(
        constants,
        gemm={
            **constants.gemm,
            "gpu": replace(gemm, issue_fraction=min(1.0, gemm.issue_fraction)),
        },
        architectures=with_facts(constants, {n: {"joules_per_flop": j} for n, j in joules.items()}),
    )


def set_attention(constants: ComputeConstants, point: Point, direction: str) -> ComputeConstants:
    """Set the constants of attention in one direction to the values of `point`.

    The last value is the factor for heads wider than 128.
    """
    facts: dict[str, dict[str, Any]] = {
        name: {f"attention_{direction}": point[2 * i], f"{direction}_tail_rows": point[2 * i + 1]}
        for i, name in enumerate(ARCHITECTURES)
    }
    wide: dict[str, Any] = {f"wide_{direction}": min(1.0, point[-1])}
    return replace(
        constants,
        attention=replace(constants.attention, **wide),
        architectures=with_facts(constants, facts),
    )


def with_facts(
    constants: ComputeConstants, facts: dict[str, dict[str, Any]]
) -> dict[str, Architecture]:
    """Return the architectures with some facts replaced."""
    changed = {n: replace(constants.architectures[n], **values) for n, values in facts.items()}
    return {**constants.architectures, **changed}


def minimise(f: Callable[[Point], float], start: Point, *, steps: int) -> Point:
    """Return a local minimum over positive numbers: shrinking random steps in the logarithms."""
    random, width = Random(0), 0.3
    best, least = start, f(start)
    for _ in range(steps):
        trial = tuple(x * exp(random.gauss(0, width) * (random.random() < 0.5)) for x in best)
        value = f(trial)
        better = value < least
        width = min(0.5, width * 1.5) if better else max(0.005, width * 0.97)
        if better:
            best, least = trial, value
        elif width == 0.005:
            width = 0.3
    return best


def fitted_constants(
    rows: Sequence[Measured], sheets: Sheets, start: ComputeConstants
) -> ComputeConstants:
    """Return the constants that fit the rows marked for fitting."""
    gemms = [r for r in rows if r.fitted and "gemm" in r.kind]
    facts = start.architectures
    point = (
        *(getattr(start.gemm["gpu"], knob) for knob in GEMM_KNOBS),
        *(facts[name].joules_per_flop for name in ARCHITECTURES),
    )
    point = minimise(lambda p: loss(gemms, sheets, set_gemm(start, p)), point, steps=2500)
    fitted = set_gemm(start, point)
    for direction in ("forward", "backward"):
        some = [r for r in rows if r.fitted and r.kind == f"attention {direction}"]
        wide = getattr(start.attention, f"wide_{direction}")
        shares = [
            getattr(facts[name], field)
            for name in ARCHITECTURES
            for field in (f"attention_{direction}", f"{direction}_tail_rows")
        ]
        base = fitted

        def target(
            p: Point,
            b: ComputeConstants = base,
            s: Sequence[Measured] = tuple(some),
            d: str = direction,
        ) -> float:
            return loss(s, sheets, set_attention(b, p, d))

        fitted = set_attention(base, minimise(target, (*shares, wide), steps=4000), direction)
    return fitted


def print_constants(constants: ComputeConstants) -> None:
    """Print the numbers to copy."""
    print("\n[gemm.gpu]")
    for knob in GEMM_KNOBS:
        print(f"{knob} = {getattr(constants.gemm['gpu'], knob):.4g}")
    shared = constants.attention
    print(f"\n[attention]\nwide_forward = {shared.wide_forward:.3f}")
    print(f"wide_backward = {shared.wide_backward:.3f}")
    for name in ARCHITECTURES:
        facts = constants.architectures[name]
        print(f"\n[architecture.{name}]\njoules_per_flop = {facts.joules_per_flop:.4g}")
        for field in ("attention_forward", "attention_backward", "forward_tail_rows"):
            print(f"{field} = {getattr(facts, field):.3g}")
        print(f"backward_tail_rows = {facts.backward_tail_rows:.3g}")


def print_residuals(
    title: str, rows: Sequence[Measured], sheets: Sheets, constants: ComputeConstants
) -> None:
    """Print median and 90th percentile of |error|, and the median error, by device and kind."""
    errors = relative_errors(rows, sheets, constants)
    table: dict[tuple[str, str, str], list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        half = "fitted" if row.fitted else "held out"
        table.setdefault((row.device, row.kind, half), []).append(error)
    heads = f"{'device':17}{'kernel':24}{'half':10}{'rows':>5}{'|e|':>9}{'p90':>8}{'bias':>8}"
    print(f"\n{title}\n{heads}")
    for (device, kind, half), values in sorted(table.items()):
        sizes = sorted(abs(value) for value in values)
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        numbers = f"{median(sizes):9.1%}{p90:8.1%}{median(values):+8.1%}"
        print(f"{device:17}{kind:24}{half:10}{len(values):5}{numbers}")


def print_bandwidths(folder: Path, sheets: Sheets) -> None:
    """Print the bandwidths reached by memory-bound kernels as fractions of the sheet."""
    print("\nmemory-bound kernels: bandwidth reached ÷ sheet")
    for row in read_rows(folder / "ops_comm_fit_simumax.csv"):
        if row["network"].startswith("HBM:"):
            reached = float(row["busbw_GBs"]) * 1e9 / sheets[row["gpu"]].memory_bytes_per_second
            print(f"{row['gpu']:17}{row['network'][4:]:24}{reached:6.3f}")


def main(folder: Path) -> None:
    """Fit on half and on all, and print residuals, constants, and residuals of what is shipped."""
    random, sheets = Random(20), read_sheets(folder)
    rows = [*read_gemms(folder, random), *read_attention(folder, random)]
    rows += [*read_best_shapes(folder), *read_grouped(folder)]
    shipped = read_compute_constants()
    print_residuals("fitted on half", rows, sheets, fitted_constants(rows, sheets, shipped))
    tables = [r for r in rows if r.kind.startswith(("gemm", "attention"))]
    whole = [r for r in rows if r not in tables] + [replace(r, fitted=True) for r in tables]
    print_constants(fitted_constants(whole, sheets, shipped))
    print_bandwidths(folder, sheets)
    print_residuals("as shipped in efficiency.toml", rows, sheets, shipped)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
