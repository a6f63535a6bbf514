"""Scripts in bf16 and fp16 train as one process does in fp32, as far as 16 bits go."""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch

from autopar.codegen.emit import emit, write_script
from autopar.codegen.proof.comparison import RankInHalf, RankTrained, assembled, compared_in_half
from autopar.codegen.proof.plain import Task, TrainedAlone, task_of, train_alone
from autopar.codegen.proof.plain_half import PlainHalf, train_in_half
from autopar.codegen.proof.script_rank import run_as_it_is, run_script
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import run_on_ranks

STEPS = 6
ROUNDING = 5e-4  # of the outputs, of which fp16 keeps 11 bits; losses are in fp32
FEW = ("zero1", "zero3", "tp", "vocab", "pp", "zero_bubble_v")
MORE = ("ddp", "zero2", "gpipe", "interleaved", "zero_bubble", "all_zero1", "all")


def half_plan(kind: str) -> Plan:
    return pinned_plan("gpt2.py", ("layers=4",), precision=Precision.FP16, **KINDS[kind])


def half_by_script(path: str, arguments: list[str]) -> RankInHalf:
    with redirect_stdout(StringIO()):
        return run_as_it_is(path, arguments)


@cache
def alone_in_half(task: Task) -> tuple[PlainHalf, PlainHalf]:
    (trained,) = run_on_ranks(train_in_half, 1, task)
    return trained


@pytest.mark.parametrize("kind", cells((*FEW, *MORE), ("zero3",)))
def test_scripts_in_bf16_begin_alike_and_stay_as_near_to_fp32_as_plain_pytorch(
    kind: str, tmp_path: Path
) -> None:
    plan = pinned_plan("gpt2.py", ("layers=4",), precision=Precision.BF16, **KINDS[kind])
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype="bfloat16")
    path, ranks = str(write_script(plan, tmp_path)), plan.arrangement.ranks
    words = ["--steps", str(STEPS), "--log-every", "1"]
    found = run_on_ranks(half_by_script, ranks, path, words, timeout_seconds=120.0)
    compared = compared_in_half(found, *alone_in_half(task))
    assert compared.is_as_near, compared


@cache
def alone(task: Task) -> TrainedAlone:
    (trained,) = run_on_ranks(train_alone, 1, task)
    return trained


def ranks_of(plan: Plan, folder: Path, *, first_scale: float) -> list[RankTrained]:
    script = write_script(plan, folder)
    text = script.read_text()
    assert "LOSS_SCALE = 32768.0" in text
    script.write_text(text.replace("LOSS_SCALE = 32768.0", f"LOSS_SCALE = {first_scale}"))
    arguments = ["--steps", str(STEPS), "--log-every", "1", "--data", "synthetic"]
    return run_on_ranks(
        run_script, plan.arrangement.ranks, str(script), arguments, timeout_seconds=120.0
    )


@pytest.mark.parametrize("kind", cells((*FEW, *MORE), ("tp", "zero_bubble_v")))
def test_losses_follow_those_of_one_process_in_fp32(kind: str, tmp_path: Path) -> None:
    plan = half_plan(kind)
    found = ranks_of(plan, tmp_path, first_scale=2.0**12)[0].losses
    task = task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=False, dtype="float32")
    expected = alone(task).losses
    assert expected[-1] < expected[0] - 10 * ROUNDING  # something is learned
    assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("kind", cells(("zero1", "zero3", "tp", "pp", "all"), ("pp",)))
def test_a_step_that_overflows_is_taken_by_no_rank(kind: str, tmp_path: Path) -> None:
    plan = half_plan(kind)
    # Gradients of losses times 2^22 and 2^21 do not fit fp16.
    found = ranks_of(plan, tmp_path, first_scale=2.0**22)
    losses = found[0].losses
    assert losses[0] == losses[1] == losses[2]
    assert losses[-1] < losses[0] - 10 * ROUNDING
    whole = assembled(rank.parameters for rank in found)
    assert all(value.isfinite().all() for value in whole.values())


def test_a_script_in_fp16_is_proved_in_float64() -> None:
    assert compare(half_plan("zero1"), steps=3, data="synthetic").is_within(1e-9)


def test_weights_of_fp16_scripts_are_in_fp16(tmp_path: Path) -> None:
    script = write_script(half_plan("tp"), tmp_path)
    assert run_on_ranks(dtypes_of, 2, str(script)) == [{torch.float16}] * 2


def dtypes_of(path: str) -> set[torch.dtype]:
    from autopar.codegen.proof.script_rank import imported

    parts, _ = imported(Path(path)).main(["--steps", "1", "--data", "synthetic"])
    return {parameter.dtype for part in parts for parameter in part.parameters()}


def test_a_plan_in_tf32_is_fp32_with_faster_products_and_says_so_in_one_line() -> None:
    pins = {"data": 2, "device": "h100-sxm"}
    rounded = pinned_plan("gpt2.py", ("size=124m",), precision=Precision.TF32, **pins)
    exact = pinned_plan("gpt2.py", ("size=124m",), precision=Precision.FP32, **pins)

    added = set(script_lines(rounded)) - set(script_lines(exact))

    assert rounded.prediction.step_seconds < 0.4 * exact.prediction.step_seconds
    assert rounded.fullest[1] == exact.fullest[1]
    assert 'torch.set_float32_matmul_precision("high")  # products of fp32 in tf32' in added


def script_lines(plan: Plan) -> list[str]:
    return [line.strip() for line in emit(plan, destination=Path("train.py")).splitlines()]
