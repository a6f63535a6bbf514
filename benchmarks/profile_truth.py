"""Compares predictions from a profile with what this machine takes.

    python -m benchmarks.profile_truth [--turns 4] [--budget 4] [-o FILE]

Five models of the zoo, two taggers with recurrent layers and a decoder of transposed convolutions,
on one process: each is profiled, and planned for one CPU with the profile and by formulas alone.
Its step is run as plain PyTorch (forward, backward, fused AdamW, zero_grad). Then two gloo
processes run the all-reduces of each zoo model's gradients, and the collectives of its best plan
with two tensor ranks.

Formulas know the CPU of the device sheet, not this one: only the spread of their errors counts.
Profiles and runs take turns. The time of a step is the median CPU time of the only computing
thread, which is its wall time on a machine that nobody else uses. The shortest wall time of a step
is printed beside it.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import Prediction
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.plan import model_facts
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.profile.profile import (
    ProfileRequest,
    as_in_training,
    local_device,
    profile,
)
from autopar.planner.trace import trace
from autopar.planner.trace.build import build
from benchmarks.profile_truth_collectives import CollectiveRow, collective_rows

HERE = Path(__file__).parent
ZOO = HERE.parent / "models_zoo"
RESULT = HERE / "results" / "profile_truth.md"
STEPS = 5  # of one turn, after two that warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the rows of its batch."""

    file: str
    arguments: tuple[str, ...]
    batch: int
    folder: Path = ZOO

    @property
    def spec(self) -> str:
        """The model as on a command line."""
        return str(self.folder / self.file)


CASES = (
    Case(file="gpt2.py", arguments=("layers=2", "dim=256", "seq_len=128"), batch=8),
    Case(file="bert.py", arguments=("layers=4",), batch=16),
    Case(file="resnet.py", arguments=("size=tiny",), batch=32),
    Case(file="t5.py", arguments=("size=tiny",), batch=16),
    Case(file="mnist.py", arguments=("hidden=1024",), batch=1024),
    *(
        Case(file="profile_truth_models.py", arguments=(f"kind={kind}",), batch=16, folder=HERE)
        for kind in ("lstm", "gru", "deconv")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One model's step, as predicted and as run."""

    case: Case
    predicted_seconds: float
    formula_seconds: float  # predicted without a profile
    measured_seconds: float
    quickest_seconds: float  # the shortest wall time of a step
    provenance: str  # where the predicted time of computing comes from

    @property
    def error(self) -> float:
        """Return predicted ÷ measured seconds − 1."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def formula_ratio(self) -> float:
        """Return what formulas predict ÷ what was measured."""
        return self.formula_seconds / self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A case, traced."""

    case: Case
    model_file: ModelFile
    graph: Graph
    axes: GraphAxes
    layers: Layers


def known(case: Case) -> Known:
    """Trace a case."""
    model_file = load_model_file(case.spec, case.arguments)
    graph = trace(model_file)
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    return Known(case=case, model_file=model_file, graph=graph, axes=axes, layers=layers)


def step_row(case: Case, *, turns: int, budget_seconds: float) -> StepRow:
    """Profile and run a model in turns; the prediction is the median of those by each profile."""
    subject = known(case)
    runs: list[tuple[float, float]] = []
    predictions: list[Prediction] = []
    for _ in range(turns):
        runs += steps(subject)
        predictions.append(predicted(subject, profiled(subject, budget_seconds)))
    runs += steps(subject)
    compute = next(term for term in predictions[-1].terms if term.name == "compute")
    return StepRow(
        case=case,
        predicted_seconds=median(one.step_seconds for one in predictions),
        formula_seconds=predicted(subject, None).step_seconds,
        measured_seconds=median(own for own, _ in runs),
        quickest_seconds=min(wall for _, wall in runs),
        provenance=compute.provenance.value,
    )


def profiled(subject: Known, budget_seconds: float) -> MeasuredFile:
    """Return the measurements of a model at its batch."""
    request = ProfileRequest(
        batches=(subject.case.batch,),
        degrees=(1,),
        precision=Precision.FP32,
        total_seconds=budget_seconds,
        op_seconds=budget_seconds / 4,
    )
    return profile(subject.graph, subject.axes, subject.layers, request).measured


def predicted(subject: Known, measured: MeasuredFile | None) -> Prediction:
    """Return the prediction of the plan for one CPU, with the whole batch in one microbatch."""
    case = subject.case
    wanted = {"global_batch": str(case.batch), "precision": "fp32"}
    return search(
        subject.graph,
        subject.axes,
        subject.layers,
        model_facts(subject.model_file, subject.graph, spec=case.spec, arguments=case.arguments),
        choose_cluster(1, "cpu"),
        gathered_constraints([f"microbatch={case.batch}"], wanted, None),
        measured=measured,
    ).prediction


def steps(known_: Known) -> list[tuple[float, float]]:
    """Run training steps; return the CPU time of the thread, and the wall time, of each."""
    with as_in_training(local_device(), Precision.FP32):
        torch.set_num_threads(1)
        subject = build(known_.model_file, device="cpu", dtype=None, batch_size=known_.case.batch)
        optimizer = torch.optim.AdamW(subject.step.parameters(), fused=True)
        taken: list[tuple[float, float]] = []
        for _ in range(STEPS + 2):
            own, wall = time.thread_time(), time.perf_counter()
            subject.step.run(subject.batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            taken.append((time.thread_time() - own, time.perf_counter() - wall))
    return taken[2:]


def report(steps_: Sequence[StepRow], collectives: Sequence[CollectiveRow]) -> Iterator[str]:
    """Yield the lines of the result."""
    yield "# Predicted from a profile, and measured\n"
    yield f"Written by `benchmarks/profile_truth.py`, torch {torch.__version__}, one thread.\n"
    yield "## One process: seconds of a step\n"
    yield (
        "| model | batch | predicted | measured | error | quickest by the wall | computing is "
        "| by formulas | ÷ measured |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in steps_:
        name = f"{row.case.file} {' '.join(row.case.arguments)}"
        yield (
            f"| {name} | {row.case.batch} | {seconds_text(row.predicted_seconds)} "
            f"| {seconds_text(row.measured_seconds)} | {row.error:+.1%} "
            f"| {seconds_text(row.quickest_seconds)} | {row.provenance} "
            f"| {seconds_text(row.formula_seconds)} | {row.formula_ratio:.2f} |"
        )
    middle = median(abs(row.error) for row in steps_)
    yield f"\nmedian error {middle:.1%}, worst {max(abs(row.error) for row in steps_):.1%}\n"
    yield "By formulas: the CPU of the device sheet, which is another than this one.\n"
    yield "## Two gloo processes: seconds of collectives\n"
    yield "| model | what for | collective | payload | predicted | measured | error |"
    yield "|---|---|---|---|---|---|---|"
    for one in collectives:
        yield (
            f"| {one.model} | {one.reason} | {one.collective} | {bytes_text(one.payload_bytes)} "
            f"| {seconds_text(one.predicted_seconds)} | {seconds_text(one.measured_seconds)} "
            f"| {one.error:+.1%} |"
        )
    within = sum(abs(one.error) <= 0.25 for one in collectives)
    off = median(abs(one.error) for one in collectives)
    yield f"\nmedian error {off:.1%}; {within} of {len(collectives)} within 25 %"


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of one profile")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        row = step_row(case, turns=options.turns, budget_seconds=options.budget)
        print(f"{case.file}: {row.error:+.1%}, {row.formula_ratio:.2f}", flush=True)
        rows.append(row)
    models = [(case.spec, case.arguments, case.batch) for case in CASES if case.folder == ZOO]
    text = "\n".join(report(rows, collective_rows(models))) + "\n"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
