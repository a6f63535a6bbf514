"""metrics() of a model file sees what the model returns, whole, under every plan, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from autopar.codegen.emit import emit_with_notes
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.evaluated_models import (
    evaluated_library,
    evaluated_small,
    load_checkpoint,
    plain_outputs,
)
from tests.codegen.evaluated_runs import STEPS, events, keeping, refused, small_plan, trained
from tests.codegen.plans import plan_for
from tests.codegen.returned_models import FORMS, UNMADE, returning

SUM = "F.mse_loss(number, batch['y'], reduction='sum')"
SEVERAL = "F.cross_entropy(kind, batch['kind']) + 0.1 * F.mse_loss(number, batch['y'])"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "dp": {},
    "ZeRO-3": {"zero_levels": (Zero.PARAMETERS,)},
    "tp": {"data": 1, "tensor": 2, "split": ("vocab",)},
    "tp of layers": {"data": 1, "tensor": 2, "split": ("ffn",)},
    "rows over tp": {"data": 1, "tensor": 2, "split": ("batch",)},
    "pp": {"data": 1, "pipeline": 2},
    "tp pp": {"data": 1, "tensor": 2, "pipeline": 2, "split": ("vocab",)},
}
CELLS = [(form, way) for form in FORMS for way in WAYS]
TURNS = ("tp", "rows over tp", "pp", "tp pp", "tp of layers")
STAND = {(form, TURNS[number % len(TURNS)]) for number, form in enumerate(FORMS) if number % 3 == 0}
STAND |= {("loss and logits", "tp"), ("loss and logits", "rows over tp")}


@pytest.mark.parametrize(("form", "way"), cells(CELLS, STAND))
def test_metrics_see_whole_outputs_whatever_the_model_returns(
    form: str, way: str, tmp_path: Path
) -> None:
    path = returning(tmp_path, FORMS[form])
    trained(
        small_plan(path, **WAYS[way]), tmp_path, *keeping(tmp_path), "--eval-every", "9", steps=1
    )
    file = load_model_file(str(path))
    model: nn.Module = file.build_model().double()
    load_checkpoint(model, tmp_path / "kept" / "step-1")
    model.eval()
    assert file.build_eval_dataset is not None
    assert file.metrics is not None
    batch = default_collate(list(file.build_eval_dataset()))
    with torch.no_grad():
        measured = file.metrics(model(**batch), batch)
    expected = {name: float(value.double().mean()) for name, value in measured.items()}
    (found,) = events(tmp_path, "evaluated")
    assert found["metrics"] == pytest.approx(expected, rel=0.0, abs=1e-10)


@pytest.mark.parametrize("way", cells(("tp", "tp of layers", "pp"), ("tp",)))
def test_metrics_of_what_no_rank_computes_are_told_with_the_plan_and_refused_at_the_start(
    way: str, tmp_path: Path
) -> None:
    path = returning(tmp_path, UNMADE)
    plan = small_plan(path, **WAYS[way])
    script, notes = emit_with_notes(plan, destination=tmp_path / "train.py")
    assert len(notes) == 1
    assert notes[0].startswith("metrics() cannot use outputs['hits'].")
    assert notes[0] in " ".join(script.split())
    # What is not there hurts who uses it alone.
    trained(plan, tmp_path, *keeping(tmp_path), "--eval-every", "9", steps=1)
    assert set(events(tmp_path, "evaluated")[0]["metrics"]) == {"accuracy", "logits"}

    using = replace(UNMADE, more="found['hits'] = outputs['hits'][counted]")
    said = refused(small_plan(returning(tmp_path, using), **WAYS[way]), tmp_path)
    assert "uses outputs['hits'], which this script does not compute" in said


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


@pytest.mark.parametrize("kind", cells(SPLITS, ("data", "zero bubble v", "classes of a pipeline")))
def test_metrics_are_means_over_all_rows(kind: str, tmp_path: Path) -> None:
    path = evaluated_small(tmp_path, SEVERAL, norm="nn.LayerNorm(8)", metrics=METRICS)
    trained(small_plan(path, **SPLITS[kind]), tmp_path, *keeping(tmp_path), "--eval-every", "9")
    (number, kinds), batch = plain_outputs(
        load_model_file(str(path)), tmp_path / "kept" / f"step-{STEPS}"
    )
    hits = (kinds.argmax(-1) == batch["kind"])[batch["kind"] != -100].double().mean()
    (found,) = events(tmp_path, "evaluated")
    assert abs(found["metrics"]["accuracy"] - hits) < 1e-10
    assert abs(found["metrics"]["error"] - (number - batch["y"]).abs().mean()) < 1e-10


@pytest.mark.parametrize("degrees", cells([((2, 1, 1),), ((1, 1, 2),)], [((2, 1, 1),)]))
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
        found.append(events(folder, "evaluated")[0]["metrics"])
    assert found[0]["perplexity"] > 0
    for name, value in found[0].items():
        assert abs(found[1][name] - value) < 1e-10


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
    path = evaluated_small(tmp_path, SUM, metrics=metrics)
    said = refused(small_plan(path, data=1), tmp_path)
    assert found in said
