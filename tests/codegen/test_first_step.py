"""A script's first loss is that of plain PyTorch, or the script leaves before it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autopar.codegen.emit import write_script
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.runtime.evaluation.first_step import ALLOWED, _compare
from tests.cells import cells
from tests.codegen.evaluated_models import evaluated_library, evaluated_small
from tests.codegen.evaluated_runs import keeping, run_script, small_plan
from tests.codegen.returned_models import FORMS, returning
from tests.runtime.processes import run_on_ranks

LOSSES = {
    "a mean": "F.mse_loss(number, batch['y'])",
    "a sum": "F.mse_loss(number, batch['y'], reduction='sum')",
    "several means": "F.cross_entropy(kind, batch['kind']) + 0.1 * F.mse_loss(number, batch['y'])",
    "its own division": "(number.abs() * batch['mask']).sum() / (batch['mask'].sum() + 1)",
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "dp": {},
    "ZeRO-3": {"zero_levels": (Zero.PARAMETERS,)},
    "tp": {"data": 1, "tensor": 2, "split": ("classes",)},
    "rows over tp": {"data": 1, "tensor": 2, "split": ("batch",)},
    "pp": {"data": 1, "pipeline": 2},
    "zero bubble v": {
        "data": 1, "pipeline": 2, "stages_per_rank": 2,
        "schedules": (ScheduleKind.ZERO_BUBBLE_V,),
    },
    "tp pp": {"data": 1, "tensor": 2, "pipeline": 2, "split": ("classes",)},
}  # fmt: skip
CELLS = [(loss, norm, way) for loss in LOSSES for norm in ("Layer", "Batch") for way in WAYS]
STAND = {
    ("a mean", "Batch", "dp"),
    ("its own division", "Layer", "rows over tp"),
    ("a sum", "Layer", "pp"),
    ("several means", "Layer", "tp pp"),
}
NORMS = {"Layer": "nn.LayerNorm(8)", "Batch": "nn.BatchNorm1d(8)"}


@dataclass(frozen=True, slots=True)
class Ran:
    """What a rank's script trained and said, and with which code it left, 0 if at its end."""

    losses: Sequence[float]
    said: str
    code: int


def run_telling(path: str, arguments: Sequence[str]) -> Ran:
    """Run a script on this rank."""
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()):
        try:
            losses, code = run_script(path, arguments), 0
        except SystemExit as left:
            losses, code = [], int(str(left.code))
    return Ran(losses, said.getvalue(), code)


def ran(plan: Plan, script: Path, *arguments: str) -> list[Ran]:
    given = ["--steps", "2", "--eval-every", "0", *arguments]
    return run_on_ranks(run_telling, plan.arrangement.ranks, str(script), given)


@pytest.mark.parametrize(("loss", "norm", "way"), cells(CELLS, STAND))
def test_the_first_loss_is_compared_and_the_training_does_not_notice(
    loss: str, norm: str, way: str, tmp_path: Path
) -> None:
    plan = small_plan(evaluated_small(tmp_path, LOSSES[loss], norm=NORMS[norm]), **WAYS[way])
    script = write_script(plan, tmp_path)
    checked = ran(plan, script, "--check-first-step")
    assert "checked: the first loss is" in checked[0].said
    unchecked = ran(plan, script, "--no-check-first-step")
    assert "checked" not in unchecked[0].said
    assert [one.losses for one in checked] == [one.losses for one in unchecked]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", cells(WAYS, ("tp",)))
def test_narrow_types_are_compared_within_what_they_round(
    way: str, dtype: str, tmp_path: Path
) -> None:
    path = evaluated_small(tmp_path, LOSSES["several means"], norm=NORMS["Batch"])
    plan = small_plan(path, **WAYS[way])
    found = ran(plan, write_script(plan, tmp_path), "--check-first-step", "--dtype", dtype)
    assert "checked: the first loss is" in found[0].said


@pytest.mark.parametrize("way", cells(WAYS, ("tp pp",)))
def test_all_ranks_leave_where_it_is_another(way: str, tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["several means"], norm=NORMS["Layer"])
    plan = small_plan(path, **WAYS[way])
    script = write_script(plan, tmp_path)
    text = script.read_text(encoding="utf-8")
    line = next(
        one for one in text.splitlines() if one.startswith("    optimizer = build_optimizer")
    )
    parts = "model.parts" if plan.arrangement.pipeline > 1 else "[model]"
    wrong = f"    for part in {parts}:\n        for one in part.parameters():\n"
    wrong += "            one.data.mul_(1.01)\n"
    script.write_text(text.replace(line, wrong + line), encoding="utf-8")
    for one in ran(plan, script, "--check-first-step"):
        assert one.code == 6
        assert "the loss of the first microbatch is" in one.said
        assert "autopar verify" in one.said
    assert ran(plan, script, "--no-check-first-step")[0].code == 0


def test_weights_of_files_are_compared_too_and_what_goes_on_is_not(tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, LOSSES["a mean"], norm=NORMS["Layer"])
    plan = small_plan(path)
    script, weights = write_script(plan, tmp_path), tmp_path / "weights.safetensors"
    torch.manual_seed(3)
    save_file(load_model_file(str(path)).build_model().state_dict(), weights)
    given = ("--check-first-step", "--weights", str(weights), *keeping(tmp_path))
    first = ran(plan, script, *given)
    assert "checked: the first loss is" in first[0].said
    assert first[0].losses != ran(plan, script, "--no-check-first-step")[0].losses
    assert "checked" not in ran(plan, script, *given, "--steps", "3")[0].said


def test_a_model_of_a_library_is_called_as_the_script_calls_it(tmp_path: Path) -> None:
    plan = small_plan(evaluated_library(tmp_path), data=1, tensor=2, split=("vocab",))
    assert "checked: " in ran(plan, write_script(plan, tmp_path), "--check-first-step")[0].said


def test_what_plain_pytorch_cannot_do_is_told_and_trained(tmp_path: Path) -> None:
    plan = small_plan(returning(tmp_path, FORMS["loss and logits"]))
    script = write_script(plan, tmp_path)
    text = script.read_text(encoding="utf-8").replace("PlainModel(new_model", "PlainModel(list")
    script.write_text(text, encoding="utf-8")
    found = ran(plan, script, "--check-first-step")
    assert "note: the first step is not checked: plain PyTorch fails: Attrib" in found[0].said
    assert len(found[0].losses) == 2


def test_a_loss_that_is_nan_on_both_sides_proves_nothing_and_is_told_so(tmp_path: Path) -> None:
    plan = small_plan(evaluated_small(tmp_path, LOSSES["a mean"], norm=NORMS["Layer"]))
    script = write_script(plan, tmp_path)
    text, own = script.read_text(encoding="utf-8"), "model_file.loss"
    assert f"compute_loss = {own}" in text
    nan = f"compute_loss = lambda *given: {own}(*given) * torch.nan"
    script.write_text(text.replace(f"compute_loss = {own}", nan), encoding="utf-8")
    (said, *_) = (one.said for one in ran(plan, script, "--check-first-step", "--on-nan", "go-on"))
    assert "note: the first step is not checked: the first microbatch's loss is nan" in said
    assert "checked: the first loss" not in said


@pytest.mark.parametrize("dtype", ALLOWED)
def test_a_loss_that_no_rounding_explains_is_refused(dtype: torch.dtype) -> None:
    _compare(7.0 * (1 + 0.9 * ALLOWED[dtype]), 7.0, dtype)
    for alike in (float("nan"), float("inf")):
        _compare(alike, alike, dtype)
    for wrong in (7.0 * (1 + 1.1 * ALLOWED[dtype]), float("nan"), float("inf")):
        with pytest.raises(SystemExit):
            _compare(wrong, 7.0, dtype)
        with pytest.raises(SystemExit):
            _compare(7.0, wrong, dtype)
