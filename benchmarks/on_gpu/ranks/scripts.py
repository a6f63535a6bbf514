"""Trains tiny scripts on processes that share the device, and compares with one process on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import Comparison, RankTrained, compared
from autopar.codegen.proof.draw_audit import Axes
from autopar.codegen.proof.plain import Task, task_of
from autopar.codegen.proof.reference import Trained, train_alone
from autopar.codegen.proof.script_rank import run_script
from autopar.codegen.proof.verification import axes_of
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.precision import Precision
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.joining import joined_alone, joined_late
from benchmarks.on_gpu.report import Cell, Row
from tests.codegen.plans import pinned_plan

TABLE = (
    "Ranks: tiny scripts of several processes on the device, beside one process of plain PyTorch"
)
STEPS = 3
_OTHERS_SECONDS = 90.0  # that the checks after this one take
MEGATRON = ("ffn", "heads")
GPT2 = ("gpt2.py", ("layers=4",))
INTERLEAVED = {"schedules": (ScheduleKind.INTERLEAVED_1F1B,), "stages_per_rank": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and what its plan is made to be."""

    name: str
    model: tuple[str, tuple[str, ...]] = GPT2
    pins: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.BF16


def _zero(level: Zero) -> Mapping[str, Any]:
    return {"data": 2, "microbatch": 2, "zero_levels": (level,)}


CASES = (
    Case(name="tp 2", pins={"tensor": 2, "microbatch": 4, "split": MEGATRON}),
    Case(name="ZeRO-3", pins=_zero(Zero.PARAMETERS)),
    Case(name="ZeRO-1", pins=_zero(Zero.OPTIMIZER)),
    Case(
        name="tp 2 × pp 2, two stages a rank",
        pins={"tensor": 2, "pipeline": 2, "microbatch": 2, "split": MEGATRON, **INTERLEAVED},
    ),
    Case(
        name="pp 4, interleaved",
        model=("gpt2.py", ("layers=8",)),
        pins={"pipeline": 4, "microbatch": 2, **INTERLEAVED},
    ),
    Case(
        name="ResNet dp 2",
        model=("resnet.py", ()),
        pins={"data": 2, "microbatch": 4, "zero_levels": (Zero.NONE,)},
    ),
    Case(
        name="T5 dp 2 × tp 2",
        model=("t5.py", ()),
        pins={"data": 2, "tensor": 2, "microbatch": 4, "split": MEGATRON},
    ),
    Case(name="fp16 ZeRO-1", pins=_zero(Zero.OPTIMIZER), precision=Precision.FP16),
    Case(name="ZeRO-2", pins=_zero(Zero.GRADIENTS)),
    Case(name="no sharding", pins=_zero(Zero.NONE)),
    Case(
        name="tp 2, vocabulary split",
        pins={"tensor": 2, "microbatch": 4, "split": ("vocab",)},
    ),
    Case(
        name="pp 2 × dp 2, ZeRO-1, zero bubble",
        pins={
            "pipeline": 2,
            **_zero(Zero.OPTIMIZER),
            "schedules": (ScheduleKind.INTERLEAVED_ZERO_BUBBLE,),
        },
    ),
    Case(
        name="HSDP 4",
        pins={"data": 4, "shard": 2, "microbatch": 1, "zero_levels": (Zero.PARAMETERS,)},
    ),
    Case(
        name="fp16 tp 2 × dp 2, ZeRO-3",
        pins={"tensor": 2, "split": MEGATRON, **_zero(Zero.PARAMETERS)},
        precision=Precision.FP16,
    ),
)
TINY_CASES = (CASES[0], CASES[1], CASES[5])


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A script that is ready to run, and the same training for one process."""

    script: str
    task: Task
    axes: Axes

    @property
    def ranks(self) -> int:
        """How many processes the script is of."""
        return self.axes.pipeline * self.axes.data * self.axes.tensor


def written(case: Case, folder: str) -> Written:
    """Plan a case, and write its script."""
    file, arguments = case.model
    plan = pinned_plan(file, arguments, device="h100-sxm", precision=case.precision, **case.pins)
    return Written(
        script=str(write_script(plan, Path(folder))),
        task=task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=False),
        axes=axes_of(plan),
    )


def script_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each case, as long as there is time; plans are made meanwhile."""
    cases = TINY_CASES if context.tiny else CASES
    with TemporaryDirectory(prefix="on-gpu-") as folder, _planners(context) as planners:
        coming = [planners.submit(written, case, f"{folder}/{n}") for n, case in enumerate(cases)]
        for case, future in zip(cases, coming, strict=True):
            if context.seconds_left < (_OTHERS_SECONDS if context.is_gpu else 5):
                break
            yield Row(table=TABLE, cells={"script": case.name, **_told(future, context, folder)})
        for future in coming:
            future.cancel()


def _planners(context: Context) -> Executor:
    return ProcessPoolExecutor(1 if context.tiny else 4, mp_context=get_context("spawn"))


def _told(future: Future[Written], context: Context, folder: str) -> dict[str, Cell]:
    began = time.monotonic()
    try:
        cells = _compared(future.result(max(context.seconds_left, 1)), context, folder)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cells = {"found": " ⏎ ".join([lines[0], *lines[-3:]])}
    return {**cells, "seconds": time.monotonic() - began}


def _compared(one: Written, context: Context, folder: str) -> dict[str, Cell]:
    def ranks_of(dtype: str | None) -> list[RankTrained]:
        own = ["--steps", str(STEPS), "--log-every", "1", "--data", "synthetic"]
        own += ["--dtype", dtype] if dtype else []
        store = f"{folder}/{uuid4().hex}"
        return context.on_ranks(trained_late, one.ranks, one.script, own, context.device, store)

    expected = context.alone(trained_alone, one.task, context.device)
    exact = compared(ranks_of("float64"), expected, one.axes)
    losses = ranks_of(None)[0].losses
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected.losses, strict=True))
    return {
        "processes": one.ranks,
        "found": "; ".join(exact.faults) or "equal" if _is_equal(exact) else "DIFFERS",
        "in float64: loss": exact.loss.largest,
        "norm": exact.norm.largest,
        "gradient": exact.gradient.largest,
        "parameter": exact.parameter.largest,
        "of": exact.parameter.name,
        "as planned: loss, relative": apart,
    }


def _is_equal(exact: Comparison) -> bool:
    return exact.is_within(1e-9)


def trained_late(path: str, arguments: list[str], device: str, store: str) -> RankTrained:
    """Run a script as one of the processes of the late group."""
    with joined_late(device, store):
        return run_script(path, arguments)


def trained_alone(task: Task, device: str) -> Trained:
    """Train in one process, on the device."""
    with joined_alone(device):
        return train_alone(replace(task, device=device))
