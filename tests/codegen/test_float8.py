"""Scripts whose linear layers multiply in float8 train as one process in float8 does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from autopar.codegen.emit import emit, write_script
from autopar.codegen.proof.comparison import RankInHalf, compared_in_half
from autopar.codegen.proof.plain import (
    Task,
    batches_of,
    build_alone,
    loss_of,
    optimizer_of,
    scheduler_of,
    task_of,
)
from autopar.codegen.proof.plain_half import train_in_half
from autopar.codegen.proof.script_rank import imported, run_as_it_is
from autopar.planner.costs.prediction import Compile, Recompute, Zero
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Float8, Precision
from autopar.runtime.model import use_float8
from tests.cells import cells
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import run_on_ranks

pytest.importorskip("torchao")

STEPS = 50
KINDS: dict[str, dict[str, Any]] = {
    "dp": {"data": 2},
    "tp": {"tensor": 2, "split": ("ffn", "kv_heads")},
    "pp": {"pipeline": 2},
    "zero3": {"data": 2, "zero_levels": (Zero.PARAMETERS,)},
    "again": {"data": 2, "recompute": (RecomputePin(modules="*", mode=Recompute.FULL),)},
}


def float8_plan(kind: str, float8: Float8 = Float8.TENSORWISE) -> Plan:
    pins = {"device": "h100-sxm", "compile": Compile.LAYERS, "precision": Precision.BF16}
    return pinned_plan("llama.py", ("layers=2",), float8=float8, **pins, **KINDS[kind])


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let torch.compile return what it is given: it takes minutes on a CPU."""
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}), redirect_stdout(StringIO()):
        yield


def as_it_is(path: str, arguments: list[str]) -> RankInHalf:
    with uncompiled():
        return run_as_it_is(path, arguments)


def script_losses(path: str, arguments: list[str]) -> tuple[list[float], int]:
    """Run a script; return its losses, and how many of its layers multiply in float8."""
    with uncompiled():
        parts, losses = imported(Path(path)).main(arguments)
    modules = (module for part in parts for module in part.modules())
    return losses, sum(type(one).__name__ == "Float8Linear" for one in modules)


def gathered_types(path: str, arguments: list[str]) -> set[torch.dtype]:
    """Run a script; return the dtypes in which fully_shard gathers its parameters."""
    own, found = _fsdp_collectives._get_all_gather_input_metadatas, set[torch.dtype]()

    def noted(inputs: list[list[Tensor]]) -> Any:
        found.update(one.dtype for each in inputs for one in each)
        return own(inputs)

    with uncompiled(), patch.object(_fsdp_collectives, own.__name__, noted):
        imported(Path(path)).main(arguments)
    return found


def plain_losses(task: Task) -> list[float]:
    """Train in plain PyTorch, with the linear layers of the task converted by torchao."""
    file, losses = load_model_file(task.spec, task.arguments), []
    model = build_alone(file, task)
    if task.float8_layers:
        use_float8(model, task.float8_layers, task.scaling)
    optimizer = optimizer_of(file, model, task)
    scheduler = scheduler_of(file, optimizer, task, steps=task.steps)
    for batch in islice(batches_of(file, task), task.steps):
        loss = loss_of(model, file, batch, task)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("float8", [Float8.TENSORWISE, Float8.ROWWISE])
@pytest.mark.parametrize("kind", cells(("dp", "tp", "pp", "zero3"), ("tp", "zero3")))
def test_parallel_scripts_train_as_one_process_in_float8(
    kind: str, float8: Float8, tmp_path: Path
) -> None:
    plan = float8_plan(kind, float8)
    arguments = ["--steps", str(STEPS), "--log-every", "1", "--dtype", "float32"]
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype="float32")

    ranks = run_on_ranks(
        script_losses, plan.arrangement.ranks, str(write_script(plan, tmp_path)), arguments,
        timeout_seconds=200.0,
    )  # fmt: skip
    (alone,) = run_on_ranks(plain_losses, 1, task)

    assert sum(count for _, count in ranks) >= 14
    losses = ranks[-1][0]
    assert losses[0] == pytest.approx(alone[0], abs=1e-5)
    assert losses == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("kind", cells(("tp", "pp", "zero3", "again"), ("zero3", "again")))
def test_scripts_in_bf16_and_float8_stay_as_near_to_fp32_as_one_process(
    kind: str, tmp_path: Path
) -> None:
    plan, steps = float8_plan(kind), 6
    task = task_of(plan, plan.model.spec, steps=steps, dtype="bfloat16")
    arguments = ["--steps", str(steps), "--log-every", "1"]

    ranks = run_on_ranks(
        as_it_is, plan.arrangement.ranks, str(write_script(plan, tmp_path)), arguments,
        timeout_seconds=200.0,
    )  # fmt: skip
    (alone,) = run_on_ranks(train_in_half, 1, task)

    found = compared_in_half(ranks, *alone)
    assert found.is_as_near, found


@pytest.mark.parametrize("float8", [Float8.TENSORWISE, Float8.ROWWISE])
def test_zero_3_gathers_weights_in_float8_where_they_have_one_scale(
    float8: Float8, tmp_path: Path
) -> None:
    script = str(write_script(float8_plan("zero3", float8), tmp_path))
    for found in run_on_ranks(gathered_types, 2, script, ["--steps", "1"], timeout_seconds=200.0):
        assert (torch.float8_e4m3fn in found) is float8.gathers
        assert torch.bfloat16 in found  # norms, the embedding and the head


def test_a_script_grows_by_two_lines_and_leaves_the_head_as_it_is(tmp_path: Path) -> None:
    without, with_float8 = (
        emit(float8_plan("pp", one), destination=tmp_path / "train.py").partition('"""\n# Written')
        for one in (Float8.NONE, Float8.ROWWISE)
    )
    added = set(with_float8[2].splitlines()) - set(without[2].splitlines())
    assert '    use_float8(part, COMPILED, "rowwise", but=("lm_head",))' in added
    assert len(with_float8[2].splitlines()) <= len(without[2].splitlines()) + 2


def test_in_float64_and_where_sizes_do_not_suit_nothing_is_converted() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 24), nn.Linear(24, 32))
    use_float8(model, ("0", "1"), "tensorwise")
    assert [type(one).__name__ for one in model] == ["Float8Linear", "Linear", "Linear"]
    wide = nn.Sequential(nn.Linear(32, 48)).double()
    use_float8(wide, ("0",), "tensorwise")
    assert type(wide[0]) is nn.Linear


def test_a_machine_without_torchao_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict(sys.modules, {"torchao.float8": None}), pytest.raises(SystemExit):
        use_float8(nn.Sequential(nn.Linear(32, 48)), ("0",), "tensorwise")
    assert "torchao is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("float8", [Float8.TENSORWISE, Float8.ROWWISE])
def test_losses_in_float8_stay_near_those_of_fp32_for_fifty_steps(float8: Float8) -> None:
    plan = float8_plan("dp", float8)
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype="float32")

    (found,) = run_on_ranks(plain_losses, 1, task)
    (exact,) = run_on_ranks(plain_losses, 1, replace(task, float8_layers=()))

    assert exact[-1] < exact[0] - 0.3  # something is learned
    assert found == pytest.approx(exact, rel=1e-3)
