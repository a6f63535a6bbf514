"""Holds the script of one device against plain PyTorch, and its prediction against both.

    python -m benchmarks.one_device [NAME…] [--rounds 2] [--seconds 10] [--budget 60] [-o FILE]

For a machine with a GPU; on one without, with `tiny`, it shows that the benchmark itself runs. Each
model is planned in bf16 for the one device, once by formulas and once with a profile of its ops.
The script of the second plan, and the same training in plain PyTorch, written in two manners, run
in turns in processes of their own. The ratio is plain time ÷ script time. Peaks are of what torch
allocates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from autopar.codegen.emit import write_script
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.choose import choose_cluster
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Constraints, RecomputePin
from autopar.planner.plan.model_facts import model_facts
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Precision
from autopar.planner.profile.profile import Request, place_at_hand, profile
from autopar.planner.trace import trace
from benchmarks.one_device_sides import BY_HAND, Job, Taken, taken

ZOO = Path(__file__).parents[1] / "models_zoo"
RESULT = Path(__file__).parent / "results" / "one_device.md"
SAME_LOSS = 0.01  # relative, in bf16, after a few steps
LEAST_RATIO = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its rows, and which of its modules are recomputed."""

    name: str
    file: str
    arguments: tuple[str, ...]
    rows: int
    layers: str | None = None  # what is recomputed, by hand as by the script

    @property
    def spec(self) -> str:
        """The model as on a command line."""
        return str(ZOO / self.file)


CASES = (
    Case(name="GPT-2 1.5B", file="gpt2.py", arguments=("size=1.5b", "dropout=0.0"), rows=8),
    Case(name="Llama 1B", file="llama.py", arguments=("size=1b", "seq_len=4096"), rows=2),
    Case(
        name="Llama 8B",
        file="llama.py",
        arguments=("size=8b", "seq_len=4096"),
        rows=1,
        layers="layers.*",
    ),
)
TINY = Case(name="tiny", file="gpt2.py", arguments=("size=tiny", "dropout=0.0"), rows=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a case was predicted to take, and what its trainings took."""

    case: Case
    by_formulas: Plan
    by_profile: Plan
    sides: dict[str, tuple[Taken, ...]]  # none where a training does not fit

    def step_seconds(self, side: str) -> float:
        """Return the step of a training, in the middle of all rounds."""
        return median(seconds for one in self.sides[side] for seconds in one.seconds)

    def peak_bytes(self, side: str) -> int | None:
        """Return the most that a training had allocated."""
        peaks = [one.peak_bytes for one in self.sides[side] if one.peak_bytes is not None]
        return max(peaks, default=None)

    def ratio(self, side: str) -> float:
        """Return how many times as fast as plain PyTorch the script is."""
        return self.step_seconds(side) / self.step_seconds("script")


def measured(case: Case, *, rounds: int, seconds: float, budget_seconds: float) -> Row:
    """Plan a case in both ways, and run its trainings in turns."""
    by_formulas, by_profile = plans(case, budget_seconds=budget_seconds)
    sides: dict[str, list[Taken]] = {side: [] for side in ("script", *BY_HAND)}
    with TemporaryDirectory(prefix="one-device-") as folder:
        job = Job(
            script=write_script(by_profile, Path(folder)),
            spec=case.spec,
            arguments=case.arguments,
            rows=case.rows,
            recomputed=case.layers,
            seconds=seconds,
        )
        for _ in range(rounds):
            for side, found in sides.items():
                one = taken(side, job)
                found += [] if one is None else [one]
    row = Row(
        case=case,
        by_formulas=by_formulas,
        by_profile=by_profile,
        sides={side: tuple(found) for side, found in sides.items()},
    )
    _check_losses(row)
    return row


def plans(case: Case, *, budget_seconds: float) -> tuple[Plan, Plan]:
    """Return the plan of a case by formulas, and the same with a profile of its ops."""
    file = load_model_file(case.spec, case.arguments)
    graph = trace(file, precision=Precision.BF16)
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    facts = model_facts(file, graph, spec=case.spec, arguments=case.arguments)
    mode = Recompute.NONE if case.layers is None else Recompute.FULL
    constraints = replace(
        Constraints(precision=Precision.BF16, global_batch=case.rows),
        microbatch=case.rows,
        recompute=(RecomputePin(modules="*", mode=mode),),
    )
    request = Request(
        batches=(case.rows,),
        degrees=(1,),
        precision=Precision.BF16,
        total_seconds=budget_seconds,
        op_seconds=budget_seconds / 10,
    )
    found = profile(graph, axes, layers, request).measured
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the trainings need it
    cluster = choose_cluster(1, place_at_hand().device.name)
    return (
        search(graph, axes, layers, facts, cluster, constraints),
        search(graph, axes, layers, facts, cluster, constraints, measured=found),
    )


def _check_losses(row: Row) -> None:
    """Refuse to compare trainings that do not do the same."""
    losses = {side: found[0].loss for side, found in row.sides.items() if found}
    for side, loss in losses.items():
        if not abs(loss - losses["script"]) <= SAME_LOSS * abs(loss):
            raise SystemExit(f"{row.case.name}, {side}: losses differ, {losses}")


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the result."""
    yield "# One device: the script, plain PyTorch, and what was predicted\n"
    yield (
        f"Written by `benchmarks/one_device.py` on {device_name()}, torch {torch.__version__}, "
        f"bf16. Ratio: plain time ÷ script time, medians of steps; {LEAST_RATIO} is the aim.\n"
    )
    yield "| model | rows | script | autocast | ratio | bf16 and fp32 masters | ratio |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        plain = " | ".join(_compared(row, side) for side in BY_HAND)
        own = seconds_text(row.step_seconds("script"))
        yield f"| {row.case.name} | {row.case.rows} | {own} | {plain} |"
    yield "\n## What was predicted of the script\n"
    yield "| model | what | measured | with a profile | error | by formulas | error |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for row in rows:
        predicted = [plan.prediction for plan in (row.by_profile, row.by_formulas)]
        step, peak = row.step_seconds("script"), row.peak_bytes("script")
        cells = (
            f"{seconds_text(p.step_seconds)} | {p.step_seconds / step - 1:+.1%}" for p in predicted
        )
        yield f"| {row.case.name} | step | {seconds_text(step)} | {' | '.join(cells)} |"
        if peak is not None:
            sizes = [p.stages[0].memory.allocated_bytes for p in predicted]
            cells = (f"{bytes_text(size)} | {size / peak - 1:+.1%}" for size in sizes)
            yield f"| {row.case.name} | peak | {bytes_text(peak)} | {' | '.join(cells)} |"


def _compared(row: Row, side: str) -> str:
    if not row.sides[side]:
        return "does not fit | "
    return f"{seconds_text(row.step_seconds(side))} | {row.ratio(side):.3f}"


def device_name() -> str:
    """Return what torch calls the device at hand."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, one thread"


def main() -> None:
    """Measure, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="parts of models' names; those of a GPU if absent")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps, in a round")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a profile's ops")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    known = (*CASES, TINY)
    chosen = [c for c in known if any(part in c.name for part in options.names)] or CASES
    rows = []
    for case in chosen:
        rows.append(
            measured(
                case,
                rounds=options.rounds,
                seconds=options.seconds,
                budget_seconds=options.budget,
            )
        )
        text = "\n".join(report(rows)) + "\n"  # after each, as a machine may be lent for minutes
        options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
