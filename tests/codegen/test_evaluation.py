"""Scripts evaluate as one process would, under every plan, and train as if they did not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import emit, write_script
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.evaluated_models import (
    COUNT,
    evaluated_gpt2,
    evaluated_small,
    plain_loss,
)
from tests.codegen.evaluated_runs import (
    STEPS,
    events,
    keeping,
    refused,
    run_refused,
    small_plan,
    trained,
)
from tests.codegen.kinds import KINDS
from tests.codegen.plans import plan_for
from tests.runtime.processes import run_on_ranks

GPT2 = ("layers=4", "dropout=0.1")


def kept_in(folder: Path) -> set[str]:
    return {one.name for one in (folder / "kept").iterdir()}


EVERY = [kind for kind in KINDS if not kind.startswith("all")]
STAND = ("zero_bubble_v",)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFile, Graph]:
    """Return a model that has rows to evaluate on, and its trace."""
    file = load_model_file(str(evaluated_gpt2(tmp_path_factory.mktemp("gpt2"))), GPT2)
    return file, trace(file)


@pytest.mark.parametrize("kind", cells(EVERY, STAND))
def test_all_rows_have_the_loss_of_one_batch_and_the_training_does_not_notice(
    kind: str, gpt2: tuple[ModelFile, Graph], tmp_path: Path
) -> None:
    pins = dict(KINDS[kind])
    pipeline, data, tensor = (pins.pop(axis, 1) for axis in ("pipeline", "data", "tensor"))
    plan = plan_for(*gpt2, GPT2, degrees=(pipeline, data, tensor), **pins)
    losses = trained(plan, tmp_path, "--eval-every", "2", *keeping(tmp_path))
    assert losses == trained(plan, tmp_path)
    found = events(tmp_path, "evaluated")
    assert [(one["step"], one["rows"]) for one in found] == [(2, COUNT), (4, COUNT), (5, COUNT)]
    expected = plain_loss(gpt2[0], tmp_path / "kept" / f"step-{STEPS}")
    assert abs(found[-1]["loss"] - expected) < 1e-10


def test_unlike_data_ranks_count_each_row_once(
    gpt2: tuple[ModelFile, Graph], tmp_path: Path
) -> None:
    plan = plan_for(*gpt2, GPT2, degrees=(1, 2, 1), microbatch=2)
    unlike = replace(plan.arrangement, rows=(3, 1), microbatch=3, microbatches=2)
    trained(replace(plan, arrangement=unlike), tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (found,) = events(tmp_path, "evaluated")
    expected = plain_loss(gpt2[0], tmp_path / "kept" / f"step-{STEPS}")
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
    (found,) = events(tmp_path, "evaluated")
    assert abs(found["loss"] - expected) < 1e-10


def test_batch_norms_use_what_they_have_learnt_and_learn_nothing(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["mean over rows"], norm="nn.BatchNorm1d(8)")
    plan = small_plan(path, microbatch=4)
    losses = trained(plan, tmp_path, "--eval-every", "2", *keeping(tmp_path))
    assert losses == trained(plan, tmp_path)
    expected = plain_loss(load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}")
    assert abs(events(tmp_path, "evaluated")[-1]["loss"] - expected) < 1e-10


PAIRS = "F.cross_entropy(number @ batch['y'].T, torch.arange(len(number)))"


@pytest.mark.parametrize("tensor", cells((1, 2), (2,)))
def test_rows_that_meet_are_evaluated_in_whole_batches(tensor: int, tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, PAIRS)
    split = ("batch",) if tensor > 1 else ()
    plan = small_plan(path, data=1, tensor=tensor, microbatch=8, split=split)
    trained(plan, tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (found,) = events(tmp_path, "evaluated")
    expected = plain_loss(load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}", rows=8)
    assert found["rows"] == 8
    assert abs(found["loss"] - expected) < 1e-10


def test_the_best_stays_and_a_training_stops_that_finds_nothing_better(tmp_path: Path) -> None:
    plan = small_plan(evaluated_small(tmp_path, LOSSES["mean over rows"], of="iter"))
    still = ("--lr", "0", "--eval-every", "1", "--early-stop", "2", "--keep", "1")
    assert len(trained(plan, tmp_path, *still, *keeping(tmp_path))) == 3
    assert kept_in(tmp_path) == {"step-1", "step-3"}
    (stopped,), (finished,) = events(tmp_path, "stopped early"), events(tmp_path, "finished")
    assert (stopped["best_step"], stopped["step"], finished["step"]) == (1, 3, 3)
    # A training that has nothing left to do evaluates what it has.
    kept = str(tmp_path / "kept" / "step-3")
    rest = ("--eval-every", "1", "--resume", kept, "--metrics", str(tmp_path / "alone.jsonl"))
    assert not trained(plan, tmp_path, *rest, steps=3)
    alone = json.loads((tmp_path / "alone.jsonl").read_text().splitlines()[1])
    assert (alone["event"], alone["step"]) == ("evaluated", 3)
    assert alone["loss"] == events(tmp_path, "evaluated")[-1]["loss"]
    # It goes on knowing its best, and how long ago that was.
    assert len(trained(plan, tmp_path, *still, *keeping(tmp_path))) == 1
    assert kept_in(tmp_path) == {"step-1", "step-4"}


def test_the_weights_of_the_best_evaluation_are_exported(tmp_path: Path) -> None:
    plan = small_plan(evaluated_small(tmp_path, LOSSES["mean over rows"], of="iter"))
    unsteady = ("--lr", "60", "--clip", "0", "--eval-every", "1", "--keep", str(STEPS))
    exports = {name: tmp_path / f"{name}.safetensors" for name in ("best", "last", "again")}
    trained(plan, tmp_path, *unsteady, *keeping(tmp_path), "--export", str(exports["last"]))
    best = min(events(tmp_path, "evaluated"), key=lambda one: one["loss"])["step"]
    assert best < STEPS
    # With nothing left to train, each exports what it would have exported at its end.
    done = ("--eval-every", "1", "--checkpoint", str(tmp_path / "kept"))
    trained(plan, tmp_path, *done, "--export-best", "--export", str(exports["best"]))
    alone = ("--eval-every", "0", "--resume", str(tmp_path / "kept" / f"step-{best}"))
    other = ("--checkpoint", str(tmp_path / "other"), "--export", str(exports["again"]))
    trained(plan, tmp_path, *alone, *other, steps=best)
    assert exports["best"].read_bytes() == exports["again"].read_bytes()
    assert exports["best"].read_bytes() != exports["last"].read_bytes()


def test_a_loss_of_one_of_two_outputs_is_split(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, "F.cross_entropy(kind, batch['kind'])", norm="nn.LayerNorm(8)")
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


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_cannot_be_evaluated_on_are_told_before_the_training(
    fault: str, tmp_path: Path
) -> None:
    of, found, fix = FAULTS[fault]
    path = evaluated_small(tmp_path, LOSSES["mean over rows"], of=f"({of})")
    said = refused(small_plan(path, data=1), tmp_path)
    assert said.count("error: ") == 1
    assert found in said
    assert fix in said


def test_too_few_rows_for_a_model_whose_rows_meet_are_told(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, PAIRS, of="(lambda rows: rows[:5])")
    plan = small_plan(path, data=1, microbatch=8)
    (said,) = run_on_ranks(run_refused, 1, str(write_script(plan, tmp_path)))
    assert "has 5 rows, and is for a model whose rows depend on each other in batches of 8" in said


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
