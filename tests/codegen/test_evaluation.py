"""Scripts evaluate as one process would, under every plan, and train as if they did not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import emit, write_script
from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.evaluated_models import (
    COUNT,
    evaluated_gpt2,
    evaluated_library,
    evaluated_small,
    plain_loss,
    plain_outputs,
)
from tests.codegen.kinds import KINDS
from tests.codegen.plans import plan_for
from tests.runtime.processes import run_on_ranks
from tests.strict.ranks import run_on_strict_ranks

STEPS = 5
GPT2 = ("layers=4", "dropout=0.1")


def run_script(path: str, arguments: Sequence[str]) -> list[float]:
    """Run a script here, and return the losses that it logs."""
    script: Any = imported(Path(path))
    found: list[float] = script.main(["--log-every", "1", "--dtype", "float64", *arguments])[1]
    return found


def trained(plan: Plan, folder: Path, *arguments: str, steps: int = STEPS) -> list[float]:
    """Train by the script of a plan, which keeps its checkpoints and tells its metrics."""
    script = write_script(plan, folder, force=True)
    own = ["--steps", str(steps), *arguments]
    return run_on_strict_ranks(run_script, plan.arrangement.ranks, str(script), own)[0]


def small_plan(
    path: Path, *, pipeline: int = 1, data: int = 2, tensor: int = 1, **pins: Any
) -> Plan:
    """Return the plan of a small model; of a batch of 8 rows, a rank has 2 at a time."""
    file = load_model_file(str(path))
    own = {"microbatch": 2, **pins}
    return plan_for(file, trace(file), (), degrees=(pipeline, data, tensor), **own)


def keeping(folder: Path) -> tuple[str, ...]:
    return "--checkpoint", str(folder / "kept"), "--metrics", str(folder / "metrics.jsonl")


def kept_in(folder: Path) -> set[str]:
    return {one.name for one in (folder / "kept").iterdir()}


def told(folder: Path, event: str) -> list[Mapping[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one for one in lines if one.get("event") == event]


EVERY = [kind for kind in KINDS if not kind.startswith("all")]
STAND = ("zero1", "zero3", "tp", "zero_bubble_v")


@pytest.mark.parametrize("kind", cells(EVERY, STAND))
def test_all_rows_have_the_loss_of_one_batch_and_the_training_does_not_notice(
    kind: str, tmp_path: Path
) -> None:
    file = load_model_file(str(evaluated_gpt2(tmp_path)), GPT2)
    pins = dict(KINDS[kind])
    pipeline, data, tensor = (pins.pop(axis, 1) for axis in ("pipeline", "data", "tensor"))
    plan = plan_for(file, trace(file), GPT2, degrees=(pipeline, data, tensor), **pins)
    losses = trained(plan, tmp_path, "--eval-every", "2", *keeping(tmp_path))
    assert losses == trained(plan, tmp_path)
    found = told(tmp_path, "evaluated")
    assert [(one["step"], one["rows"]) for one in found] == [(2, COUNT), (4, COUNT), (5, COUNT)]
    expected = plain_loss(file, tmp_path / "kept" / f"step-{STEPS}")
    assert abs(found[-1]["loss"] - expected) < 1e-10


def test_unlike_data_ranks_count_each_row_once(tmp_path: Path) -> None:
    file = load_model_file(str(evaluated_gpt2(tmp_path)), GPT2)
    plan = plan_for(file, trace(file), GPT2, degrees=(1, 2, 1), microbatch=2)
    unlike = replace(plan.arrangement, rows=(3, 1), microbatch=3, microbatches=2)
    trained(replace(plan, arrangement=unlike), tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (found,) = told(tmp_path, "evaluated")
    expected = plain_loss(file, tmp_path / "kept" / f"step-{STEPS}")
    assert abs(found["loss"] - expected) < 1e-10


LOSSES = {
    "mean over rows": "F.mse_loss(number, batch['y'])",
    "sum": "F.mse_loss(number, batch['y'], reduction='sum')",
    "several means": "F.cross_entropy(kind, batch['kind']) + 0.1 * F.mse_loss(number, batch['y'])",
    "own division": "(number.abs() * batch['mask']).sum() / (batch['mask'].sum() + 1)",
}


@pytest.mark.parametrize("kind", LOSSES)
def test_each_kind_of_loss_weighs_as_in_the_training(kind: str, tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES[kind], norm="nn.LayerNorm(8)")
    plan = small_plan(path)
    trained(plan, tmp_path, *keeping(tmp_path), "--eval-every", "9")
    expected = plain_loss(load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}")
    if kind == "sum":
        expected *= 8 / COUNT  # told as that of a step
    (found,) = told(tmp_path, "evaluated")
    assert abs(found["loss"] - expected) < 1e-10


def test_batch_norms_use_what_they_have_learnt_and_learn_nothing(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["mean over rows"], norm="nn.BatchNorm1d(8)")
    plan = small_plan(path, microbatch=4)
    losses = trained(plan, tmp_path, "--eval-every", "2", *keeping(tmp_path))
    assert losses == trained(plan, tmp_path)
    expected = plain_loss(load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}")
    assert abs(told(tmp_path, "evaluated")[-1]["loss"] - expected) < 1e-10


PAIRS = "F.cross_entropy(number @ batch['y'].T, torch.arange(len(number)))"


@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_that_meet_are_evaluated_in_whole_batches(tensor: int, tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, PAIRS)
    split = ("batch",) if tensor > 1 else ()
    plan = small_plan(path, data=1, tensor=tensor, microbatch=8, split=split)
    trained(plan, tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (found,) = told(tmp_path, "evaluated")
    expected = plain_loss(load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}", rows=8)
    assert found["rows"] == 8
    assert abs(found["loss"] - expected) < 1e-10


def test_the_best_stays_and_a_training_stops_that_finds_nothing_better(tmp_path: Path) -> None:
    plan = small_plan(evaluated_small(tmp_path, LOSSES["mean over rows"], of="iter"))
    still = ("--lr", "0", "--eval-every", "1", "--early-stop", "2", "--keep", "1")
    assert len(trained(plan, tmp_path, *still, *keeping(tmp_path))) == 3
    assert kept_in(tmp_path) == {"step-1", "step-3"}
    (stopped,), (finished,) = told(tmp_path, "stopped early"), told(tmp_path, "finished")
    assert (stopped["best_step"], stopped["step"], finished["step"]) == (1, 3, 3)
    # A training that has nothing left to do evaluates what it has.
    kept = str(tmp_path / "kept" / "step-3")
    rest = ("--eval-every", "1", "--resume", kept, "--metrics", str(tmp_path / "alone.jsonl"))
    assert not trained(plan, tmp_path, *rest, steps=3)
    alone = json.loads((tmp_path / "alone.jsonl").read_text().splitlines()[1])
    assert (alone["event"], alone["step"]) == ("evaluated", 3)
    assert alone["loss"] == told(tmp_path, "evaluated")[-1]["loss"]
    # It goes on knowing its best, and how long ago that was.
    assert len(trained(plan, tmp_path, *still, *keeping(tmp_path))) == 1
    assert kept_in(tmp_path) == {"step-1", "step-4"}


METRICS = "{'accuracy': hits[valid], 'error': (number - batch['y']).abs()}"


SPLITS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data": 2},
    "pipeline": {"pipeline": 2},
    "zero bubble v": {
        "pipeline": 2, "schedules": (ScheduleKind.ZERO_BUBBLE_V,), "stages_per_rank": 2,
    },
    "rows over tensor ranks": {"tensor": 2, "data": 1, "split": ("batch",)},
    "classes over tensor ranks": {"tensor": 2, "data": 1, "split": ("classes",)},
    "classes of a pipeline": {"tensor": 2, "pipeline": 2, "data": 1, "split": ("classes",)},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPLITS)
def test_metrics_are_means_over_all_rows(kind: str, tmp_path: Path) -> None:
    path = evaluated_small(
        tmp_path, LOSSES["several means"], norm="nn.LayerNorm(8)", metrics=METRICS
    )
    trained(small_plan(path, **SPLITS[kind]), tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (number, kinds), batch = plain_outputs(
        load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}"
    )
    hits = (kinds.argmax(-1) == batch["kind"])[batch["kind"] != -100].double().mean()
    (found,) = told(tmp_path, "evaluated")
    assert abs(found["metrics"]["accuracy"] - hits) < 1e-10
    assert abs(found["metrics"]["error"] - (number - batch["y"]).abs().mean()) < 1e-10


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)])
def test_metrics_find_what_a_model_of_a_library_returns(
    degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    file = load_model_file(str(evaluated_library(tmp_path)))
    split = ("vocab",) if degrees[2] > 1 else ()
    graph = trace(file)
    found = []
    for number, (kind, axes) in enumerate((((1, 1, 1), ()), (degrees, split))):
        folder = tmp_path / str(number)
        folder.mkdir()
        trained(
            plan_for(file, graph, (), degrees=kind, split=axes),
            folder, *keeping(folder), "--eval-every", "9", "--lr", "0",
        )  # fmt: skip
        found.append(told(folder, "evaluated")[0]["metrics"])
    assert found[0]["perplexity"] > 0
    for name, value in found[0].items():
        assert abs(found[1][name] - value) < 1e-10


ONE_HEAD = "F.cross_entropy(kind, batch['kind'])"
AS_OBJECT = "Both(number=self.number(x), kind=self.kind(x))"
BOTH = """
@dataclasses.dataclass
class Both:
    number: torch.Tensor
    kind: torch.Tensor


class Small"""


@pytest.mark.parametrize("returns", ["what the loss does not need", "an object"])
def test_a_plan_without_the_outputs_has_no_metrics_and_says_so(
    returns: str, tmp_path: Path
) -> None:
    loss = LOSSES["sum"] if returns == "an object" else ONE_HEAD
    path = evaluated_small(tmp_path, loss, norm="nn.LayerNorm(8)", metrics=METRICS)
    if returns == "an object":
        text = path.read_text(encoding="utf-8").replace("\nclass Small", BOTH)
        text = text.replace("return self.number(x), self.kind(x)", f"return {AS_OBJECT}")
        text = text.replace("number, kind = outputs", "number, kind = outputs.number, outputs.kind")
        path.write_text("import dataclasses\n" + text, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=(2, 1, 1))
    script = emit(plan, destination=tmp_path / "train.py")
    assert "Note: evaluations have the loss alone, and no metrics()" in script
    assert "new_metrics" not in script


def test_a_loss_of_one_of_two_outputs_is_split(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, ONE_HEAD, norm="nn.LayerNorm(8)")
    found = compare(small_plan(path, tensor=2, data=1, split=("classes",)), steps=2)
    assert found.is_within(1e-10), found


FAULTS = {
    "empty": ("lambda rows: []", "the dataset (list) is empty", "build_eval_dataset"),
    "an empty stream": ("lambda rows: iter(())", "is empty", "build_eval_dataset"),
    "other keys": (
        "lambda rows: [{'x': rows[0]['x']}]",
        "has x, but no y, kind, mask",
        "__getitem__",
    ),
    "no file": ("lambda rows: open('nowhere')", "build_eval_dataset() of the model file fails", ""),
}


def run_refused(path: str) -> str:
    """Run a script that leaves before it trains, and return what it says."""
    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit, match="6"):
        run_script(path, ["--steps", "1", "--eval-every", "1"])
    return said.getvalue()


def refused(model: Path, folder: Path) -> str:
    script = write_script(small_plan(model, data=1), folder)
    (said,) = run_on_ranks(run_refused, 1, str(script))
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_cannot_be_evaluated_on_are_told_before_the_training(
    fault: str, tmp_path: Path
) -> None:
    of, found, fix = FAULTS[fault]
    said = refused(evaluated_small(tmp_path, LOSSES["mean over rows"], of=f"({of})"), tmp_path)
    assert said.count("error: ") == 1
    assert found in said
    assert fix in said


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ("{'accuracy': hits.double().mean()}", "'accuracy' of metrics() is a single number"),
        ("hits", "metrics() of the model file returns a Tensor"),
        ("{'accuracy': hits.sum().item()}", "returns a dict of int"),
        ("{'accuracy': batch['hits']}", "metrics() of the model file fails: KeyError: 'hits'"),
    ],
)
def test_metrics_that_have_no_mean_over_all_rows_are_told(
    metrics: str, found: str, tmp_path: Path
) -> None:
    said = refused(evaluated_small(tmp_path, LOSSES["sum"], metrics=metrics), tmp_path)
    assert found in said


def test_too_few_rows_for_a_model_whose_rows_meet_are_told(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, PAIRS, of="(lambda rows: rows[:5])")
    plan = small_plan(path, data=1, microbatch=8)
    (said,) = run_on_ranks(run_refused, 1, str(write_script(plan, tmp_path)))
    assert (
        "build_eval_dataset() has 5 rows, and is for a model whose rows meet in batches of 8"
        in said
    )


def test_a_script_says_which_printed_code_evaluates_as_it_trains(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["mean over rows"], norm="nn.LayerNorm(8)")
    asks = "        if self.training:\n            x = 2 * x\n        x = self.body(x)"
    text = path.read_text(encoding="utf-8").replace("        x = self.body(x)", asks)
    path.write_text(text, encoding="utf-8")
    file = load_model_file(str(path))
    told, quiet = (
        emit(plan_for(file, trace(file), (), degrees=degrees), destination=tmp_path / "train.py")
        for degrees in ((2, 1, 1), (1, 2, 1))
    )
    assert "Note: evaluations run Small as in training" in told
    assert "as in training" not in quiet


def test_verify_takes_a_script_that_evaluates(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["several means"], norm="nn.LayerNorm(8)")
    found = compare(small_plan(path), steps=2)
    assert found.is_within(1e-10), found


def test_rows_to_evaluate_on_want_rows_to_train_on(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["sum"])
    path.write_text(path.read_text().replace("def build_dataset", "def other"), encoding="utf-8")
    with pytest.raises(InputError, match="there is a build_eval_dataset, and no build_dataset"):
        load_model_file(str(path))
