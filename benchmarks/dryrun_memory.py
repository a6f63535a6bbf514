"""Compares the memory that plans predict with that of dry runs of their scripts.

    python benchmarks/dryrun_memory.py [--only llama8b-8 …] [-o FILE]

The plans are for Llama 8B on 8 and Llama 70B on 64 A100s of 80 GB: the best ones, and some with
pinned degrees. Of each plan, a rank of the first, of a middle and of the last stage is run. The
page is rewritten after every rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.codegen.proof.dryrun.running import DryRun, dry_run
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import MemoryPrediction
from autopar.planner.errors import AutoparError
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planning import make_plan

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "dryrun_memory.md"
DEVICE = "a100-80gb"
CLOSE, MOST_SECONDS = 0.05, 60
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama on some devices, and the pins of its plan."""

    name: str
    size: str
    gpus: int
    pins: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank of one plan."""

    case: Case
    plan: Plan
    run: DryRun
    predicted: MemoryPrediction
    seconds: float
    processor_seconds: float  # CPU time of all processes: a busy machine hardly changes it

    @property
    def is_close(self) -> bool:
        """Whether the error is at most CLOSE, and the run took at most MOST_SECONDS."""
        return abs(self.run.error) <= CLOSE and self.seconds <= MOST_SECONDS


CASES = (
    Case(name="llama8b-8", size="8b", gpus=8),
    Case(name="llama70b-64", size="70b", gpus=64),
    Case(name="8b-zero3", size="8b", gpus=8, pins="dp=8,zero=3"),
    Case(name="8b-tp8", size="8b", gpus=8, pins="tp=8"),
    Case(name="8b-pp4-tp2", size="8b", gpus=8, pins="pp=4,tp=2"),
    Case(name="8b-pp8-zb", size="8b", gpus=8, pins="pp=8,schedule=interleaved-zero-bubble"),
    Case(name="8b-pp4-zbv", size="8b", gpus=8, pins="pp=4,dp=2,schedule=zero-bubble-v"),
    Case(name="8b-pp4-il", size="8b", gpus=8, pins="pp=4,dp=2,schedule=interleaved-1f1b"),
    Case(name="8b-pp2-zero3", size="8b", gpus=8, pins="pp=2,dp=4,zero=3,schedule=1f1b"),
)


def measured(case: Case) -> Iterator[Row]:
    """Plan a case and run some of its ranks dry."""
    plan = make_plan(
        str(ROOT / "models_zoo" / "llama.py"),
        [f"size={case.size}"],
        choose_cluster(case.gpus, DEVICE),
        gathered_constraints([case.pins] if case.pins else [], {}, None),
        time_limit_seconds=120,
    )
    arranged = plan.arrangement
    ranks_of_stage = arranged.data * arranged.tensor
    for place in dict.fromkeys((0, arranged.pipeline // 2, arranged.pipeline - 1)):
        began, processor_began = time.perf_counter(), _processor_seconds()
        run = dry_run(plan, ROOT, rank=place * ranks_of_stage)
        stage = [stage.rank for stage in plan.stages].index(place)
        yield Row(
            case=case,
            plan=plan,
            run=run,
            predicted=plan.prediction.stages[stage].memory,
            seconds=time.perf_counter() - began,
            processor_seconds=_processor_seconds() - processor_began,
        )


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def page(rows: Sequence[Row], refused: Sequence[str]) -> str:
    """Return the whole page."""
    reached = sum(row.is_close for row in rows)
    return "\n".join(
        (
            "# The memory of plans against dry runs of their scripts\n",
            f"Remade by `python benchmarks/dryrun_memory.py`; Llamas on {DEVICE}. Each cell has "
            "the plan's figure, then the dry run's, in GiB of tensors at the peak. State: "
            "parameters (also gathered ones), gradients and optimizer. Work space: tensors that "
            "exist only while a layer runs, and buckets. "
            f"Within {CLOSE:.0%} and {MOST_SECONDS} s: {reached} of {len(rows)} ranks. "
            f"Load average at the end: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.\n",
            *table(rows),
            *(f"\n{one}" for one in refused),
            "",
        )
    )


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the rows as a table in Markdown."""
    columns = "case|plan|rank|state|activations|work space|in all|error|s|of processors"
    yield f"|{columns}|"
    yield "|---|---" + "|---:" * (columns.count("|") - 1) + "|"
    for row in rows:
        plan, run = planned_gib(row.predicted), run_gib(row.run.peak_bytes_by_category)
        figures = " | ".join(f"{plan[name]:.2f}, {run[name]:.2f}" for name in plan)
        yield (
            f"| {row.case.name} | {arrangement_words(row.plan.arrangement)} | {row.run.rank} "
            f"| {figures} | {row.run.predicted_bytes / GIB:.2f}, {row.run.peak_bytes / GIB:.2f} "
            f"| {row.run.error:+.1%} | {row.seconds:.0f} | {row.processor_seconds:.0f} |"
        )


def planned_gib(memory: MemoryPrediction) -> Mapping[str, float]:
    """Return what a plan predicts, by the columns of the table."""
    state = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    return {
        "state": (state + memory.unsharded_bytes) / GIB,
        "activations": memory.activation_bytes / GIB,
        "work space": (memory.transient_bytes + memory.communication_bytes) / GIB,
    }


def run_gib(categories: Mapping[str, int]) -> Mapping[str, float]:
    """Return what a dry run holds, by the columns of the table."""
    other = {"activations": "activations", "temporary": "work space"}
    found = {"state": 0.0, "activations": 0.0, "work space": 0.0}
    for name, size in categories.items():
        found[other.get(name, "state")] += size / GIB
    return found


def main() -> None:
    """Measure, print, and write the page after each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="CASE")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows: list[Row] = []
    refused: list[str] = []
    for case in (case for case in CASES if case.name in options.only):
        try:
            for row in measured(case):
                rows.append(row)
                print(list(table(rows))[-1], flush=True)
                options.output.write_text(page(rows, refused), encoding="utf-8")
        except AutoparError as error:
            refused.append(f"{case.name}: {error}")
            print(refused[-1], flush=True)
    options.output.write_text(page(rows, refused), encoding="utf-8")


if __name__ == "__main__":
    main()
