"""Scripts whose linear layers multiply in float8 train as one process in float8 does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
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
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.layers import Compile
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Float8, Precision
from autopar.runtime.model import use_float8
from autopar.runtime.model.parts import _block_scaled, in_float8
from tests.cells import cells
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import run_on_ranks

pytest.importorskip("torchao")

STEPS = 50
IN_FLOAT8 = [one for one in Float8 if one is not Float8.NONE]
KINDS: dict[str, dict[str, Any]] = {
    "dp": {"data": 2},
    "tp": {"tensor": 2, "split": ("ffn", "kv_heads")},
    "pp": {"pipeline": 2},
    "zero3": {"data": 2, "zero_levels": (Zero.PARAMETERS,)},
    "again": {"data": 2, "recompute": (RecomputePin(modules="*", mode=Recompute.FULL),)},
}


def float8_plan(kind: str, float8: Float8 = Float8.TENSORWISE) -> Plan:
    pins = {"device": "b200-sxm", "compile": Compile.LAYERS, "precision": Precision.BF16}
    # both halves of each weight suit the kernels, too
    sizes = ("layers=2", "dim=128") if kind == "tp" else ("layers=2",)
    return pinned_plan("llama.py", sizes, float8=float8, **pins, **KINDS[kind])


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
    return losses, len(in_float8(parts))


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


@pytest.mark.parametrize("float8", IN_FLOAT8)
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


NEAR = [(kind, Float8.TENSORWISE) for kind in ("tp", "pp", "zero3", "again")]
NEAR += [(kind, Float8.MXFP8) for kind in ("zero3", "tp")]


@pytest.mark.parametrize(("kind", "float8"), cells(NEAR, (*NEAR[2:4], NEAR[-1])))
def test_scripts_in_bf16_and_float8_stay_as_near_to_fp32_as_one_process(
    kind: str, float8: Float8, tmp_path: Path
) -> None:
    plan, steps = float8_plan(kind, float8), 6
    task = task_of(plan, plan.model.spec, steps=steps, dtype="bfloat16")
    arguments = ["--steps", str(steps), "--log-every", "1"]

    ranks = run_on_ranks(
        as_it_is, plan.arrangement.ranks, str(write_script(plan, tmp_path)), arguments,
        timeout_seconds=200.0,
    )  # fmt: skip
    (alone,) = run_on_ranks(train_in_half, 1, task)

    found = compared_in_half(ranks, *alone)
    assert found.is_as_near, found


@pytest.mark.parametrize("float8", IN_FLOAT8)
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
    assert '    use_float8(part, COMPILED, "rowwise", excluding=("lm_head",))' in added
    assert len(with_float8[2].splitlines()) <= len(without[2].splitlines()) + 2


@pytest.mark.parametrize("float8", IN_FLOAT8)
def test_in_float64_and_where_sizes_do_not_suit_nothing_is_converted(float8: Float8) -> None:
    sizes = (64, float8.multiple * 3, float8.multiple // 2, 64)
    model = nn.Sequential(*map(nn.Linear, sizes[:-1], sizes[1:]))
    use_float8(model, ("0", "1"), float8.value)
    assert [one in in_float8([model]) for one in model] == [True, False, False]
    assert [one.in_features for one in model] == list(sizes[:-1])
    wide = nn.Sequential(nn.Linear(64, 96)).double()
    use_float8(wide, ("0",), float8.value)
    assert type(wide[0]) is nn.Linear


def test_products_in_blocks_are_those_of_rounded_factors_whatever_the_number_of_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96)).requires_grad_()
    exact = deepcopy(model)
    use_float8(model, ("0",), "mxfp8")
    source = torch.randn(3, 7, 64)  # 21 rows are padded to 32
    found, plain = (gradients_of(one, source) for one in (model, exact))
    # a block's largest element is at most 448 after scaling, and 3 bits follow the first one: each
    # factor is off by at most 1/16 of itself
    for one, other in zip(found, plain, strict=True):
        assert one.shape == other.shape
        assert 0.001 < float((one - other).norm() / other.norm()) < 1 / 16
    # scales are those of blocks, so a block of large elements leaves the others as they are
    with_large = source.clone()
    with_large[..., :32] = 0.0
    alone = model(with_large)
    with_large[..., :32] = 1e-30
    assert torch.equal(model(with_large), alone)


def gradients_of(model: nn.Sequential, source: Tensor) -> tuple[Tensor, ...]:
    """Return the result, and the gradients of input and weight."""
    source = source.clone().requires_grad_()
    result = model(source)
    (result * torch.linspace(-1, 1, 96)).sum().backward()
    gradients = [one.grad for one in (source, model.get_parameter("0.weight"))]
    return result.detach(), *(one for one in gradients if one is not None)


def test_parts_of_a_weight_have_the_blocks_of_the_whole() -> None:
    torch.manual_seed(0)
    source, whole = torch.randn(32, 64), nn.Linear(64, 64, bias=False)
    columns = [nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)]
    rows = [nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)]
    with torch.no_grad():
        for place, (column, row) in enumerate(zip(columns, rows, strict=True)):
            column.weight.copy_(whole.weight[32 * place : 32 * place + 32])
            row.weight.copy_(whole.weight[:, 32 * place : 32 * place + 32])
    model = nn.ModuleList((whole, *columns, *rows))
    use_float8(model, ("0", "1", "2", "3", "4"), "mxfp8")
    assert torch.equal(whole(source), torch.cat([one(source) for one in columns], 1))
    both = rows[0](source[:, :32]) + rows[1](source[:, 32:])
    torch.testing.assert_close(whole(source), both, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "lost"),
    [("tensorwise", "torchao.float8"), ("mxfp8", "torchao.prototype.moe_training.mxfp8_linear")],
)
def test_a_machine_without_torchao_is_told(
    scaling: str, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _block_scaled.cache_clear()
    with patch.dict(sys.modules, {lost: None}), pytest.raises(SystemExit):
        use_float8(nn.Sequential(nn.Linear(32, 64)), ("0",), scaling)
    assert "torchao is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scaling", "capability", "hip", "is_refused"),
    [
        ("tensorwise", (8, 0), None, True),
        ("tensorwise", (8, 9), None, False),
        ("tensorwise", (9, 4), "6.4", False),
        ("mxfp8", (9, 0), None, True),
        ("mxfp8", (10, 0), None, False),
        ("mxfp8", (10, 3), None, False),
        ("mxfp8", (12, 0), None, True),  # torchao's kernels are for data centers
        ("mxfp8", (9, 5), "6.4", True),
    ],
)
def test_a_gpu_without_the_units_is_refused(
    scaling: str, capability: tuple[int, int], hip: str | None, is_refused: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda: capability),
        patch.object(torch.cuda, "get_device_name", lambda: "this GPU"),
        patch.object(torch.version, "hip", hip),
    ):
        if is_refused:
            with pytest.raises(SystemExit):
                use_float8(nn.Sequential(), (), scaling)
            found = capsys.readouterr().err
            assert f"in float8 ({scaling}), and this GPU has no such units" in found
        else:
            use_float8(nn.Sequential(), (), scaling)


@pytest.mark.parametrize("float8", IN_FLOAT8)
def test_losses_in_float8_stay_near_those_of_fp32_for_fifty_steps(float8: Float8) -> None:
    plan = float8_plan("dp", float8)
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype="float32")

    (found,) = run_on_ranks(plain_losses, 1, task)
    (exact,) = run_on_ranks(plain_losses, 1, replace(task, float8_layers=()))

    assert exact[-1] < exact[0] - 0.3  # something is learned
    assert found == pytest.approx(exact, rel=1e-3)
