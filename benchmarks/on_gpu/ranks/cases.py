"""Plans tiny models for several processes, and writes their scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from autopar.codegen.emit import write_script
from autopar.codegen.proof.draws import AxisSizes
from autopar.codegen.proof.plain import Task, task_of
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.precision import Precision
from tests.codegen.plans import pinned_plan

STEPS = 3
MEGATRON = ("ffn", "heads")
GPT2 = ("gpt2.py", ("layers=4",))
INTERLEAVED = {"schedules": (ScheduleKind.INTERLEAVED_1F1B,), "stages_per_rank": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the pins and precision of its plan."""

    name: str
    model: tuple[str, tuple[str, ...]] = GPT2
    pins: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.BF16

    @property
    def ranks(self) -> int:
        """How many processes run the script."""
        return prod(self.pins.get(axis, 1) for axis in ("pipeline", "data", "tensor"))


def _zero(level: Zero) -> Mapping[str, Any]:
    return {"data": 2, "microbatch": 2, "zero_levels": (level,)}


CASES = (
    Case(name="tp 2", pins={"tensor": 2, "microbatch": 4, "split": MEGATRON}),
    Case(
        name="tp 2 × pp 2, two stages a rank",
        pins={"tensor": 2, "pipeline": 2, "microbatch": 2, "split": MEGATRON, **INTERLEAVED},
    ),
    Case(name="ZeRO-1", pins=_zero(Zero.OPTIMIZER)),
    Case(
        name="pp 4, interleaved",
        model=("gpt2.py", ("layers=8",)),
        pins={"pipeline": 4, "microbatch": 2, **INTERLEAVED},
    ),
    Case(name="ZeRO-3", pins=_zero(Zero.PARAMETERS)),
    Case(
        name="T5 dp 2 × tp 2",
        model=("t5.py", ()),
        pins={"data": 2, "tensor": 2, "microbatch": 4, "split": MEGATRON},
    ),
    Case(name="fp16 ZeRO-1", pins=_zero(Zero.OPTIMIZER), precision=Precision.FP16),
    Case(
        name="ResNet dp 2",
        model=("resnet.py", ()),
        pins={"data": 2, "microbatch": 4, "zero_levels": (Zero.NONE,)},
    ),
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
TINY_CASES = tuple(case for case in CASES if case.name in ("tp 2", "ZeRO-3", "ResNet dp 2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A script that is ready to run, and the same training for one process."""

    script: str
    task: Task
    axes: AxisSizes

    @property
    def ranks(self) -> int:
        """How many processes run the script."""
        return self.axes.pipeline * self.axes.data * self.axes.tensor


def written(case: Case, folder: str) -> Written:
    """Plan a case, and write its script."""
    file, arguments = case.model
    plan = pinned_plan(file, arguments, device="h100-sxm", precision=case.precision, **case.pins)
    own = plan.arrangement
    return Written(
        script=str(write_script(plan, Path(folder))),
        task=task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=False),
        axes=AxisSizes(
            pipeline=own.pipeline, data=own.data, tensor=own.tensor, microbatches=own.microbatches
        ),
    )
