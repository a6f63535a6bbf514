"""Measures every plan that the search can choose for small models, on two local processes.

    python -m benchmarks.every_plan [MODEL…] [--rounds 3] [--budget 30] [-o FILE]

Each model is profiled with its collectives, as by `autopar profile --net`. Then every arrangement
of the search (degrees, microbatches, schedule, ZeRO) is planned with that profile and with each
recompute mode, and its script trains on two gloo processes of one thread. The scripts take turns in
several rounds, so that a slow minute of the machine affects all of them.
The page compares predicted with measured times, and the plan that the search chooses with the best.
The fastest of a hundred measurements is partly luck. So the chosen plan and the few fastest run
again in turns, and only these runs say how far the chosen plan is from the best.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from autopar.codegen.emit import write_script
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.errors import AutoparError
from autopar.planner.plan.declared.constraints import Constraints, RecomputePin
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.search import Explorer, search
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.profile.net import measure_net
from autopar.planner.profile.profile import ProfileRequest, local_device, profile
from benchmarks.every_plan_ranks import RANKS, step_seconds
from benchmarks.profile_truth import Case, Known, known
from benchmarks.validation.scoring import kendall_tau

RESULT = Path(__file__).parent / "results" / "every_plan.md"
FINALISTS = 5
ROUNDS_OF_THE_FINAL = 6
CASES = (
    Case(
        file="gpt2.py",
        arguments=("layers=4", "dim=192", "heads=6", "seq_len=128", "vocab_size=1024"),
        batch=8,
    ),
    Case(
        file="llama.py",
        arguments=("layers=4", "dim=192", "heads=6", "kv_heads=2", "ffn=512"),
        batch=4,
    ),
    Case(file="bert.py", arguments=("layers=6",), batch=8),
    Case(file="t5.py", arguments=("layers=3",), batch=8),
    Case(file="resnet.py", arguments=("size=tiny",), batch=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan, as predicted and as run."""

    arrangement: Arrangement
    recompute: Recompute
    predicted_seconds: float
    measured_seconds: float
    again_seconds: float | None = None  # measured again; only for the chosen and fastest plans

    @property
    def error(self) -> float:
        """Return predicted ÷ measured seconds − 1."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def words(self) -> str:
        """Return the plan in one line."""
        recomputed = "" if self.recompute is Recompute.NONE else f", recompute {self.recompute}"
        return arrangement_words(self.arrangement) + recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All plans of a model, and the one of them that the search chooses."""

    case: Case
    rows: tuple[Row, ...]
    chosen: Row
    refused: int

    @property
    def median_error(self) -> float:
        """Return the median of the absolute errors."""
        return median(abs(row.error) for row in self.rows)

    @property
    def tau(self) -> float:
        """Return Kendall's τ of the predictions and the measurements: 1 if their orders agree."""
        return kendall_tau(
            [row.predicted_seconds for row in self.rows],
            [row.measured_seconds for row in self.rows],
        )

    @property
    def lost(self) -> float:
        """Return by which share the chosen plan is slower than the best; both were run again."""
        assert self.chosen.again_seconds is not None
        best = min(row.again_seconds for row in self.rows if row.again_seconds is not None)
        return self.chosen.again_seconds / best - 1


def trial(case: Case, *, rounds: int, budget_seconds: float) -> Trial:
    """Profile a model, plan it in every way, and train all of the plans in turns."""
    subject = known(case)
    measured = profiled(subject, budget_seconds)
    planner = Planner(subject, measured)
    plans, refused = planner.every_plan()
    best = planner.chosen()
    (chosen,) = (
        number
        for number, plan in enumerate(plans)
        if (plan.arrangement, mode_of(plan)) == (best.arrangement, mode_of(best))
    )
    with TemporaryDirectory(prefix="every-plan-") as name:
        scripts = [
            write_script(plan, Path(name) / str(number)) for number, plan in enumerate(plans)
        ]
        taken = in_turns(scripts, range(len(plans)), rounds=rounds)
        fastest = sorted(taken, key=lambda number: taken[number])[:FINALISTS]
        again = in_turns(scripts, {chosen, *fastest}, rounds=ROUNDS_OF_THE_FINAL)
    rows = tuple(
        Row(
            arrangement=plan.arrangement,
            recompute=mode_of(plan),
            predicted_seconds=plan.prediction.step_seconds,
            measured_seconds=taken[number],
            again_seconds=again.get(number),
        )
        for number, plan in enumerate(plans)
    )
    return Trial(case=case, rows=rows, chosen=rows[chosen], refused=refused)


def in_turns(
    scripts: Sequence[Path], numbers: Collection[int], *, rounds: int
) -> Mapping[int, float]:
    """Run these scripts in turns, and return the median seconds of a step of each."""
    taken: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(rounds):
        for number in random.sample(sorted(taken), len(taken)):
            taken[number] += step_seconds(scripts[number])
    return {number: median(seconds) for number, seconds in taken.items()}


def profiled(subject: Known, budget_seconds: float) -> MeasuredFile:
    """Return what `autopar profile --net` measures, for every possible microbatch."""
    sizes = (size for size in range(1, subject.case.batch + 1) if subject.case.batch % size == 0)
    request = ProfileRequest(
        batches=tuple(sizes),
        degrees=(1, RANKS),
        precision=Precision.FP32,
        total_seconds=budget_seconds,
        op_seconds=budget_seconds / 10,
    )
    found = profile(subject.graph, subject.axes, subject.layers, request).measured
    device = local_device()
    net = measure_net(device_name=device.name, device=device.torch_name, ranks=RANKS)
    return replace(found, nets=(net,))


class Planner:
    """Plans one model on two processes: in every way, or in the best one."""

    def __init__(self, subject: Known, measured: MeasuredFile) -> None:
        self.subject, self.measured = subject, measured
        self.cluster: Cluster = measured.on(choose_cluster(RANKS, "cpu"))
        self.free = Constraints(precision=Precision.FP32, global_batch=subject.case.batch)

    def every_plan(self) -> tuple[list[Plan], int]:
        """Return a plan for every arrangement and recompute mode, and how many are refused."""
        plans: list[Plan] = []
        refused = 0
        for arrangement in self._arrangements():
            for mode in Recompute:
                try:
                    plan = self._planned(pinned(self.free, arrangement, mode))
                except AutoparError:
                    refused += 1
                    continue
                if mode_of(plan) is mode:  # else the layers have nothing to recompute
                    plans.append(plan)
        return plans, refused

    def chosen(self) -> Plan:
        """Return what the search chooses by itself."""
        return self._planned(self.free)

    def _arrangements(self) -> Iterator[Arrangement]:
        subject = self.subject
        own = SearchSubject(graph=subject.graph, axes=subject.axes, layers=subject.layers)
        explorer = Explorer(own, self.cluster, self.free, measured=self.measured)
        for point in explorer.points:
            yield from explorer.points.variants(point)

    def _planned(self, constraints: Constraints) -> Plan:
        subject, case = self.subject, self.subject.case
        file, graph = subject.model_file, subject.graph
        return search(
            graph,
            subject.axes,
            subject.layers,
            model_facts(file, graph, spec=case.spec, arguments=case.arguments),
            self.cluster,
            constraints,
            measured=self.measured,
        )


def pinned(free: Constraints, arrangement: Arrangement, mode: Recompute) -> Constraints:
    """Return constraints that allow only one arrangement, and one recompute mode in all layers."""
    return replace(
        free,
        pipeline=arrangement.pipeline,
        data=arrangement.data,
        tensor=arrangement.tensor,
        shard=arrangement.shard,
        microbatch=arrangement.microbatch,
        stages_per_rank=arrangement.stages_per_rank,
        schedules=(arrangement.schedule,),
        zero_levels=(arrangement.zero,),
        recompute=(RecomputePin(modules="*", mode=mode),),
    )


def mode_of(plan: Plan) -> Recompute:
    """Return the recompute mode of most layers."""
    modes = [mode for stage in plan.stages for mode in stage.recompute]
    return max(Recompute, key=modes.count)


def report(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of the result."""
    yield "# Every plan of small models, predicted and measured\n"
    yield (
        f"Written by `benchmarks/every_plan.py`: {RANKS} gloo processes of one thread, fp32, "
        f"torch {torch.__version__}; predictions with a profile of the same machine. The chosen "
        f"plan and the {FINALISTS} that ran fastest ran again in turns; these runs alone say how "
        "far the chosen plan is from the best.\n"
    )
    yield "| model | rows | plans | median error | Kendall τ | chosen | measured | over the best |"
    yield "|---|--:|--:|--:|--:|---|--:|--:|"
    for one in trials:
        yield (
            f"| {one.case.file} | {one.case.batch} | {len(one.rows)} | {one.median_error:.1%} "
            f"| {one.tau:.2f} | {one.chosen.words} "
            f"| {_text(one.chosen.again_seconds)} | {one.lost:+.1%} |"
        )
    for one in trials:
        yield f"\n## {one.case.file} {' '.join(one.case.arguments)}\n"
        yield "| plan | predicted | measured | error | again |"
        yield "|---|--:|--:|--:|--:|"
        for row in sorted(one.rows, key=lambda row: row.measured_seconds):
            yield (
                f"| {row.words} | {seconds_text(row.predicted_seconds)} "
                f"| {seconds_text(row.measured_seconds)} | {row.error:+.1%} "
                f"| {_text(row.again_seconds)} |"
            )


def _text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help="parts of file names; all of them if absent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a profile's ops")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    trials = []
    for case in CASES:
        if not options.models or any(part in case.file for part in options.models):
            trials.append(trial(case, rounds=options.rounds, budget_seconds=options.budget))
            options.output.write_text("\n".join(report(trials)) + "\n", encoding="utf-8")
            last = trials[-1]
            words = f"median error {last.median_error:.1%}, τ {last.tau:.2f}, {last.lost:+.1%}"
            print(f"{case.file}: {len(last.rows)} plans, {words} over the best", flush=True)


if __name__ == "__main__":
    main()
