"""Scripts whose layers are compiled train as one process does without compiling."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import emit
from autopar.planner.costs.prediction import Recompute
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.layers import Compile
from autopar.planner.plan.declared.constraints import RecomputePin
from tests.cells import cells
from tests.codegen import compiled_cells, test_lengths
from tests.codegen.compiled_runs import compiled_cell, compiled_ranks
from tests.codegen.equality import compare
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan

STAND = {("llama", "zero-3"), ("mnist", "pp"), ("mnist", "tp")}
LENGTHS = ("dp", "tp", "sp", "pp")
SELECTIVE = (RecomputePin(modules="*", mode=Recompute.SELECTIVE),)


@pytest.mark.more_cells  # the cells below run all but torch's own compiler
@pytest.mark.parametrize("kind", ["tp", "ddp", "zero1", "zero3", "pp", "tp_pp"])
def test_layers_compiled_by_inductor_train_as_they_do_without(kind: str, tmp_path: Path) -> None:
    plan = pinned_plan("gpt2.py", ("layers=2",), compile=Compile.LAYERS, **KINDS[kind])
    assert "compile_layers(" in emit(plan, destination=tmp_path / "train.py")

    found = compare(plan, steps=2)

    assert found.is_within(1e-9), found


@pytest.mark.parametrize(
    ("model", "kind"), cells(product(compiled_cells.SUBJECTS, compiled_cells.KINDS), STAND)
)
def test_compiled_layers_of_any_model_train_as_one_process_does(model: str, kind: str) -> None:
    found = compiled_cell(
        compiled_cells.SUBJECTS[model], compiled_cells.KINDS[kind], backend="aot_eager"
    )
    assert found.verdict in ("equal", "refused"), found.detail
    for rank in found.ranks:
        assert rank.again == 0, "nothing is compiled after the second step"
        assert not rank.breaks or compiled_cells.breaks_graphs(model, kind), rank.breaks


@pytest.mark.parametrize("way", cells(LENGTHS, ("sp",)))
def test_rows_of_other_lengths_are_not_compiled_again_and_again(way: str) -> None:
    plan = test_lengths.planned("nanogpt", way, compile=Compile.LAYERS)
    ranks = compiled_ranks(plan, steps=test_lengths.STEPS, dtype="float64", backend="eager")
    assert all(told.again == 0 and not told.breaks for _, told in ranks), ranks[0][1]
    plain = test_lengths.train_plainly("nanogpt")
    assert ranks[0][0].losses == pytest.approx(plain.losses, abs=test_lengths.TOLERANCE)


def test_compiled_layers_exclude_schedules_with_split_backwards() -> None:
    pins = _pipelined(tuple(ScheduleKind))
    plan = pinned_plan("gpt2.py", ("layers=4",), compile=Compile.LAYERS, **pins)
    assert not SCHEDULES[plan.arrangement.schedule].splits_backward


def _pipelined(kinds: tuple[ScheduleKind, ...]) -> dict[str, Any]:
    return {"pipeline": 2, "microbatch": 2, "schedules": kinds, "stages_per_rank": 1}


def test_compiled_layers_are_not_recomputed_in_part() -> None:
    with pytest.raises(InputError, match="selective"):
        pinned_plan("gpt2.py", compile=Compile.LAYERS, recompute=SELECTIVE, data=2)
