"""Compares chosen plans with the layouts of published runs, under one cost model and one memory.

    python -m benchmarks.against_published TABLE.csv … [--most N] [--seconds S] [-o RESULT.md]

For each model on each number of devices, the fastest published layout (of the first global batch in
the tables) is priced with the planner's own costs, with the recomputation that the run had. Then
the best plan for the same batch is searched, and both are printed. A ratio above 1 means that the
plan is slower than what people ran. A published layout may not fit by our memory model, because
another framework's kernels save less. The plan may then use as much memory as that layout needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.toml_reading import bytes_text
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.errors import AutoparError
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.candidate import Candidate
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.plan.telling.words import arrangement_words, recompute_words
from autopar.planner.precision import Compression
from autopar.planner.trace import trace
from benchmarks.validate import zoo_folder
from benchmarks.validation.machines import cluster_of
from benchmarks.validation.models import ModelShape, shape_of
from benchmarks.validation.settings import settings_of
from benchmarks.validation.skip import reason_to_skip
from benchmarks.validation.table import Row, read_tables, stated

_ENDLESS_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A model on some devices: its published layout, and the best plan."""

    row: Row
    published: Candidate
    limit_bytes: int  # the memory that both may use, if a device has less; otherwise 0
    chosen: Candidate
    gap: float
    seconds: float


def main() -> None:
    """Compare, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=10**9, help="groups, the smallest first")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one search")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    try:
        rows = fastest(row for row in read_tables(options.tables) if _is_usable(row))
    except AutoparError as error:
        parser.error(str(error))
    lines = [
        "| model | devices | batch | published layout | predicted | chosen plan | predicted "
        "| ratio | gap |",
        "|---|---|--:|---|--:|---|--:|--:|--:|",
    ]
    print(*lines, sep="\n")
    for row in rows[: options.most]:
        try:
            line = _line(compared(row, options.seconds))
        except AutoparError as error:
            line = f"| {row.model_name} | {row.gpus} × {row.gpu} | | {error.found} | | | | | |"
        lines.append(line)
        print(line, flush=True)
        if options.output:  # a long run that is stopped leaves what it has
            options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_usable(row: Row) -> bool:
    return not reason_to_skip(row) and row.iteration_time_s is not None


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Return a run of each model on each number of devices, few devices first.

    It is the fastest of those with the first global batch in the tables.
    """
    best: dict[object, Row] = {}
    for row in rows:
        key = row.hidden, row.layers, row.seq_len, row.gpu, row.gpus, row.global_batch
        known = best.get(key)
        if known is None or stated_seconds(row) < stated_seconds(known):
            best[key] = row
    first_batches: dict[object, Row] = {}
    for row in best.values():
        first_batches.setdefault((row.hidden, row.layers, row.seq_len, row.gpu, row.gpus), row)
    return sorted(first_batches.values(), key=lambda row: (stated(row.gpus), stated(row.layers)))


def stated_seconds(row: Row) -> float:
    """Return the measured seconds of a step."""
    assert row.iteration_time_s is not None
    return row.iteration_time_s


@cache
def subject_of(shape: ModelShape, layers: int) -> SearchSubject:
    """Return the traced model with all its layers."""
    arguments = [
        f"layers={layers}", f"heads={shape.heads}", f"kv_heads={shape.kv_heads}",
        f"dim={shape.hidden}", f"ffn={shape.ffn}", f"seq_len={shape.seq_len}",
        f"vocab_size={shape.vocabulary}", f"tied={shape.is_tied}",
    ]  # fmt: skip
    if shape.file == "gpt2.py":
        arguments.append("dropout=0.0")
    graph = trace(load_model_file(str(zoo_folder() / shape.file), arguments))
    axes = infer_axes(graph)
    return SearchSubject(graph=graph, axes=axes, layers=find_layers(graph, axes))


def compared(row: Row, most_seconds: float) -> Compared:
    """Price the published layout of a row and search the best plan for the same batch."""
    settings = settings_of(row)
    cluster = cluster_of(
        row.gpu, stated(row.gpus), stated(row.gpus_per_node), row.intra_bw, row.inter_bw
    )
    subject = subject_of(shape_of(row, dropout=0.0), stated(row.layers))
    constraints = Constraints(global_batch=stated(row.global_batch))
    explorer = Explorer(subject, cluster, constraints)
    modes = frozenset({settings.remade.recompute, settings.remade.second})
    bucket = explorer.solver.demands.bucket_bytes[0]
    arrangement = replace(settings.arrangement, bucket_bytes=bucket, compression=Compression.NONE)
    if arrangement.zero.value == 0:
        arrangement = replace(arrangement, shard=arrangement.data)
    explorer, published, limit_bytes = _published(explorer, arrangement, modes)
    began = time.perf_counter()
    outcome = explorer.explore(is_late=lambda: time.perf_counter() - began > most_seconds)
    if not outcome.found:
        raise explorer.refusal(outcome)
    return Compared(
        row=row,
        published=published,
        limit_bytes=limit_bytes,
        chosen=outcome.found[0].leaf,
        gap=outcome.gap,
        seconds=time.perf_counter() - began,
    )


def _published(
    explorer: Explorer, arrangement: Arrangement, modes: frozenset[Recompute]
) -> tuple[Explorer, Candidate, int]:
    """Price the published layout; return the search for a plan with as much memory, and the layout.

    The last result is 0 if the layout fits a device, otherwise the bytes that it needs.
    """
    found = _solved(explorer, arrangement, modes)
    if found is not None:
        return explorer, found, 0
    found = _solved(
        explorer.within(_ENDLESS_BYTES, explorer.constraints.objective), arrangement, modes
    )
    assert found is not None, "layers find a place in endless memory"
    needed = found.prediction.peak_memory.device_bytes
    return explorer.within(needed, explorer.constraints.objective), found, needed


def _solved(
    explorer: Explorer, arrangement: Arrangement, modes: frozenset[Recompute]
) -> Candidate | None:
    layers = len(explorer.subject.layers.layers)
    demands = replace(explorer.solver.demands, modes=(modes,) * layers)
    return explorer.solver.under(demands).solve(arrangement).candidate


def _line(one: Compared) -> str:
    return "| " + " | ".join(_cells(one)) + " |"


def _cells(one: Compared) -> Iterator[str]:
    row, chosen = one.row, one.chosen
    yield f"{row.model_name} {row.layers}×{row.hidden}"
    given = f", given {bytes_text(one.limit_bytes)} each" if one.limit_bytes else ""
    yield f"{row.gpus} × {row.gpu}{given}"
    yield str(row.global_batch)
    yield _told(one.published)
    yield f"{one.published.prediction.step_seconds:.3f} s"
    yield _told(chosen)
    yield f"{chosen.prediction.step_seconds:.3f} s"
    ours = chosen.prediction.step_seconds
    yield f"{ours / one.published.prediction.step_seconds:.2f}"
    yield f"{one.gap:.1%} in {one.seconds:.0f} s"


def _told(candidate: Candidate) -> str:
    words = arrangement_words(candidate.arrangement)
    return f"{words}; recompute {recompute_words(candidate.stages)}"


if __name__ == "__main__":
    main()
