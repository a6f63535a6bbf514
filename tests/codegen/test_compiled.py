"""Scripts whose layers are compiled train as one process does without compiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import emit
from autopar.planner.costs.prediction import Compile, Recompute
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import RecomputePin
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan

AGAIN = (RecomputePin(modules="*", mode=Recompute.FULL),)
WHOLE: dict[str, dict[str, Any]] = {  # models that change no class with two data ranks
    "resnet.py": {"data": 2, "global_batch": 4},
    "vit.py": {"data": 2},
    "t5.py": {"tensor": 2},
    "llama.py": {"pipeline": 2, "tensor": 2},
}


@pytest.mark.parametrize("kind", cells(("tp", "ddp", "zero1", "zero3", "pp", "tp_pp"), ("tp",)))
def test_compiled_layers_train_as_they_do_without_compiling(kind: str, tmp_path: Path) -> None:
    plan = pinned_plan("gpt2.py", ("layers=2",), compile=Compile.LAYERS, **KINDS[kind])
    assert "compile_layers(" in emit(plan, destination=tmp_path / "train.py")

    found = compare(plan, steps=2)

    assert found.is_within(1e-9), found


@pytest.mark.parametrize("name", cells(tuple(WHOLE), ()))
def test_compiled_layers_of_any_model_train_alike(name: str) -> None:
    plan = pinned_plan(name, (), compile=Compile.LAYERS, **WHOLE[name])

    assert compare(plan, steps=2).is_within(1e-9)


@pytest.mark.parametrize("kind", cells(("ddp", "zero3", "pp"), ()))
def test_compiled_layers_that_run_again_draw_the_same_numbers(kind: str) -> None:
    pins = {**KINDS[kind], "recompute": AGAIN}
    plan = pinned_plan("gpt2.py", ("layers=2",), compile=Compile.LAYERS, **pins)

    assert compare(plan, steps=2).is_within(1e-9)


def test_compiled_layers_exclude_schedules_with_split_backwards() -> None:
    pins = _pipelined(tuple(ScheduleKind))
    plan = pinned_plan("gpt2.py", ("layers=4",), compile=Compile.LAYERS, **pins)
    assert not SCHEDULES[plan.arrangement.schedule].splits_backward


def _pipelined(kinds: tuple[ScheduleKind, ...]) -> dict[str, Any]:
    return {"pipeline": 2, "microbatch": 2, "schedules": kinds, "stages_per_rank": 1}


def test_compiled_layers_are_not_recomputed_in_part() -> None:
    selective = (replace(AGAIN[0], mode=Recompute.SELECTIVE),)

    with pytest.raises(InputError, match="selective"):
        pinned_plan("gpt2.py", compile=Compile.LAYERS, recompute=selective, data=2)
