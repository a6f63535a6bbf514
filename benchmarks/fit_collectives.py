"""Refits the constants of collectives: `python -m benchmarks.fit_collectives TABLE_DIR [--fit]`.

TABLE_DIR holds ops_nccl.csv, ops_busbw_ratio_simai.csv and ops_comm_fit_simumax.csv (columns as in
docs). Without --fit only the residuals of the shipped constants are printed. Rows whose machine is
not stated are left out. The tables do not say the following, which is assumed here: SimAI's ratios
are of 400 Gb/s per GPU between nodes and of 450 GB/s within one, and its collectives between nodes
are ring all-gathers; rows of Galvatron without a size are of 256 MiB; SimuMax's fits are of 1 GiB.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.planner.costs.collectives.algorithms import (
    CollectiveConstants,
    Protocol,
    read_collective_constants,
)
from autopar.planner.costs.collectives.choice import ways
from benchmarks.fit_collectives_tables import MEBIBYTE, Row, nccl_rows, simai_rows, simumax_rows

CLASSES = (
    (64 * 1024, "≤ 64 KiB"),
    (MEBIBYTE, "≤ 1 MiB"),
    (16 * MEBIBYTE, "≤ 16 MiB"),
    (256 * MEBIBYTE, "≤ 256 MiB"),
)
STIFFNESS = 0.01  # mean |log error| that moving one constant by a factor e must save


def errors(rows: Sequence[Row], constants: CollectiveConstants) -> list[float]:
    """Return predicted bus bandwidth ÷ measured − 1, row by row."""
    return [
        row.seconds
        / min(way.seconds for way in ways(row.collective, row.payload_bytes, row.shape, constants))
        - 1
        for row in rows
    ]


def loss(rows: Sequence[Row], constants: CollectiveConstants) -> float:
    """Return the mean |log ratio|; messages of up to 64 KiB count a quarter."""
    weights = [0.25 if row.payload_bytes <= 64 * 1024 else 1.0 for row in rows]
    missed = [abs(math.log1p(error)) for error in errors(rows, constants)]
    return sum(w * m for w, m in zip(weights, missed, strict=True)) / sum(weights)


Knob = Callable[[CollectiveConstants, float], CollectiveConstants]


def knobs() -> list[tuple[str, Knob]]:
    """Return every constant with the function that scales it."""
    plain = [
        name for name in CollectiveConstants.__dataclass_fields__ if name not in ("nccl", "gloo")
    ]
    per_protocol = {
        0: ("base_seconds", "fraction"),
        1: ("base_seconds", "hop_seconds", "fraction"),
        2: ("base_seconds", "hop_factor", "hop_seconds"),
    }
    return [(name, _plain_knob(name)) for name in plain] + [
        (f"nccl[{index}].{name}", _protocol_knob(index, name))
        for index, names in per_protocol.items()
        for name in names
    ]


def _plain_knob(name: str) -> Knob:
    def scaled(constants: CollectiveConstants, factor: float) -> CollectiveConstants:
        value = getattr(constants, name) * factor
        limit = 1.0 if name.endswith("_fraction") else math.inf
        return dataclasses.replace(constants, **{name: min(value, limit)})

    return scaled


def _protocol_knob(index: int, name: str) -> Knob:
    def scaled(constants: CollectiveConstants, factor: float) -> CollectiveConstants:
        old = constants.nccl[index]
        value = getattr(old, name) * factor
        new: Protocol = dataclasses.replace(
            old, **{name: min(value, 0.97) if name == "fraction" else value}
        )
        return dataclasses.replace(
            constants, nccl=(*constants.nccl[:index], new, *constants.nccl[index + 1 :])
        )

    return scaled


def is_ruled_by_launch(row: Row) -> bool:
    """Whether a row mostly times the launch, which a training step hides behind queued work."""
    return row.table == "framework timer" and row.payload_bytes < 16 * MEBIBYTE


def starting_point() -> CollectiveConstants:
    """Return the constants of NCCL's model (src/graph/tuning.cc), close to which the fit stays."""
    ll, ll128, simple = read_collective_constants().nccl
    return dataclasses.replace(
        read_collective_constants(),
        nccl=(
            dataclasses.replace(ll, base_seconds=6.6e-6, fraction=0.3),
            dataclasses.replace(ll128, base_seconds=14e-6, hop_seconds=1.4e-6, fraction=0.9),
            dataclasses.replace(simple, base_seconds=8.4e-6, hop_factor=4.0, hop_seconds=1.5e-6),
        ),
        tree_fraction=0.92,
        tree_hop_factor=1.85,
        tree_chunk_seconds=20e-6,
        chunk_ramp_seconds=4e-6,
        in_switch_seconds=23e-6,
        point_to_point_fraction=0.8,
        all_to_all_fraction=0.87,
    )


def fit(rows: Sequence[Row], constants: CollectiveConstants) -> CollectiveConstants:
    """Return the constants after coordinate descent with shrinking steps.

    Moving constants away from NCCL's own values, at which the fit starts, adds to its loss, because
    the tables cannot tell all constants apart.
    """
    scales = {name: 0.0 for name, _ in knobs()}  # logarithm of what each constant was multiplied by
    best = loss(rows, constants)
    for step in (1.3, 1.12, 1.05, 1.02):
        for _ in range(3):
            before = best
            for name, scaled in knobs():
                for factor in (step, 1 / step):
                    trial = scaled(constants, factor)
                    moved = {**scales, name: scales[name] + math.log(factor)}
                    value = loss(rows, trial) + STIFFNESS * sum(
                        scale**2 for scale in moved.values()
                    )
                    if value < best:
                        constants, best, scales = trial, value, moved
                        break
            if before - best < 1e-4:
                break
    return constants


def size_class(row: Row) -> str:
    """Return the class of a payload."""
    return next((name for limit, name in CLASSES if row.payload_bytes <= limit), "> 256 MiB")


def report(rows: Sequence[Row], constants: CollectiveConstants, key: Callable[[Row], str]) -> None:
    """Print median and 90th percentile of the errors of bus bandwidth, group by group."""
    table: dict[str, list[float]] = {}
    for row, error in zip(rows, errors(rows, constants), strict=True):
        table.setdefault(key(row), []).append(error)
    for name, group in table.items():
        sizes = sorted(abs(error) for error in group)
        worst = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
        print(
            f"  {name:44} {len(group):4} rows   median |error| {statistics.median(sizes):6.1%}"
            f"   90th percentile {worst:6.1%}   median error {statistics.median(group):+6.1%}"
        )


def main() -> None:
    """Read the tables, fit if asked, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    rows = [
        *nccl_rows(arguments.tables / "ops_nccl.csv"),
        *simai_rows(arguments.tables / "ops_busbw_ratio_simai.csv"),
        *simumax_rows(arguments.tables / "ops_comm_fit_simumax.csv"),
    ]
    constants = read_collective_constants()
    if arguments.fit:
        constants = fit([row for row in rows if not is_ruled_by_launch(row)], starting_point())
        print(constants)
    print(f"{len(rows)} rows")
    report(sorted(rows, key=lambda row: row.payload_bytes), constants, size_class)
    report(rows, constants, lambda row: row.table)
    report(
        rows,
        constants,
        lambda row: (
            f"{row.table}: {row.collective}, {row.shape.nodes}×{row.shape.members_per_node}"
        ),
    )
    report(
        [row for row in rows if row.table == "nccl-tests"],
        constants,
        lambda row: f"nccl-tests {size_class(row)}",
    )


if __name__ == "__main__":
    main()
