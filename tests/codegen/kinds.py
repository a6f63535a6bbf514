"""One small plan for each kind of script."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.plan.plan import Plan
from tests.codegen.plans import pinned_plan

_MEGATRON = ("ffn", "heads")
_LEVELS = {level: {"zero_levels": (level,)} for level in Zero}


def _schedule(kind: ScheduleKind, per_rank: int = 1) -> dict[str, Any]:
    pins = {"schedules": (kind,), "stages_per_rank": per_rank}
    return {"pipeline": 2, "microbatch": 2, **pins}


# Of GPT-2 with four layers, unless the name says another model.
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ddp": {"data": 2, "microbatch": 2, **_LEVELS[Zero.NONE]},
        "zero1": {"data": 2, "microbatch": 2, **_LEVELS[Zero.OPTIMIZER]},
        "zero2": {"data": 2, "microbatch": 2, **_LEVELS[Zero.GRADIENTS]},
        "zero3": {"data": 2, "microbatch": 2, **_LEVELS[Zero.PARAMETERS]},
        "hsdp": {"data": 4, "shard": 2, "microbatch": 1, **_LEVELS[Zero.PARAMETERS]},
        "tp": {"tensor": 2, "microbatch": 4, "split": _MEGATRON},
        "vocab": {"tensor": 2, "microbatch": 4, "split": ("vocab",)},
        "tp_dp": {"tensor": 2, "data": 2, "microbatch": 2, "split": _MEGATRON},
        "tp_zero1": {
            "tensor": 2, "data": 2, "microbatch": 2, "split": _MEGATRON, **_LEVELS[Zero.OPTIMIZER],
        },
        "tp_zero3": {
            "tensor": 2, "data": 2, "microbatch": 2, "split": _MEGATRON, **_LEVELS[Zero.PARAMETERS],
        },
        "gpipe": _schedule(ScheduleKind.GPIPE),
        "pp": _schedule(ScheduleKind.ONE_F_ONE_B),
        "pp4": {"pipeline": 4, "microbatch": 2},
        "interleaved": _schedule(ScheduleKind.INTERLEAVED_1F1B, 2),
        "zero_bubble": _schedule(ScheduleKind.INTERLEAVED_ZERO_BUBBLE),
        "zero_bubble_v": _schedule(ScheduleKind.ZERO_BUBBLE_V, 2),
        "pp_dp": {"pipeline": 2, "data": 2, "microbatch": 2, **_LEVELS[Zero.NONE]},
        "pp_zero1": {"pipeline": 2, "data": 2, "microbatch": 2, **_LEVELS[Zero.OPTIMIZER]},
        "pp_zero3": {"pipeline": 2, "data": 2, "microbatch": 2, **_LEVELS[Zero.PARAMETERS]},
        "tp_pp": {"tensor": 2, "pipeline": 2, "microbatch": 2, "split": _MEGATRON},
        "vocab_pp": {"tensor": 2, "pipeline": 2, "microbatch": 4, "split": ("vocab",)},
        "all_zero1": {
            "tensor": 2, "pipeline": 2, "data": 2, "microbatch": 1, "split": _MEGATRON,
            "device": "h100-sxm", **_LEVELS[Zero.OPTIMIZER],
        },
        "all": {
            "tensor": 2, "pipeline": 2, "data": 2, "microbatch": 1, "split": _MEGATRON,
            "device": "h100-sxm", **_LEVELS[Zero.PARAMETERS],
        },
    }
)  # fmt: skip


def plan_of(kind: str, *arguments: str) -> Plan:
    """Return the plan of a kind."""
    return pinned_plan("gpt2.py", arguments or ("layers=4",), **KINDS[kind])
