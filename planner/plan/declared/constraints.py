"""What a person demands of a plan: as it was declared, and as the search reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from autopar.planner.costs.prediction import Arrangement, Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.precision import Precision


class Objective(StrEnum):
    """What the best plan has least of."""

    STEP_TIME = "step-time"
    MEMORY = "memory"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What a rank may use of its device: bytes, or a share of what the device has."""

    size_bytes: int | None = None
    share: float | None = None

    def bytes_of(self, device_bytes: int) -> int:
        """Return the limit on a device; more than it has is never to be had."""
        if self.share is not None:
            return int(device_bytes * self.share)
        return min(self.size_bytes or device_bytes, device_bytes)


# Where no limit is declared. 95 % of the 54 published runs that tell their memory took at most
# 1 ÷ 0.86 times what is predicted of them (docs/accuracy.md).
USUAL_MEMORY = MemoryLimit(share=0.86)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """An axis that the ops of some modules must or must not be split along."""

    modules: str  # glob over module paths, "*" for all
    axis: str  # as people call it
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePin:
    """Modules whose layers run on one stage."""

    modules: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePin:
    """Modules whose layers are recomputed in one way."""

    modules: str
    mode: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One constraint as it was written: `value` goes into the field of Constraints."""

    place: str  # where a constraints file has it, "pins.tp"; rules are numbered, "splits 2"
    field: str
    value: Any  # of the type of the field, or one member of it where the field lists rules
    text: str  # "tp=8"
    origin: str  # "--pin" or "constraints.toml, line 3"

    def __str__(self) -> str:
        return f"{self.text} ({self.origin})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """All that the search has to respect; None and empty rules leave the choice to it."""

    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    shard: int | None = None
    microbatch: int | None = None
    stages_per_rank: int | None = None
    max_pipeline: int | None = None
    max_data: int | None = None
    max_tensor: int | None = None
    memory: MemoryLimit | None = None
    objective: Objective = Objective.STEP_TIME
    tolerance: float = 0.03  # of the fastest step: within it, the simplest plan is chosen
    schedules: tuple[ScheduleKind, ...] = tuple(ScheduleKind)
    zero_levels: tuple[Zero, ...] = tuple(Zero)
    precision: Precision = Precision.BF16
    global_batch: int | None = None
    samples: int | None = None  # rows of the whole training
    tokens: int | None = None  # of the whole training
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    compression: tuple[bool, ...] = (False,)  # of gradients, which costs precision: opt in
    bucket_bytes: tuple[int, ...] = ()
    splits: tuple[SplitRule, ...] = ()
    stages: tuple[StagePin, ...] = ()
    recompute: tuple[RecomputePin, ...] = ()
    shares_rows: bool = False  # rows meet: the tensor axis may split a batch, the data axis not
    statistics_apart: bool = False  # batch norms may take those of each microbatch by itself
    one_microbatch: bool = False  # they may not: each data rank has all of its rows at once
    steps_once: bool = False  # no two data ranks step the same number of a parameter
    declared: tuple[Declared, ...] = ()


RULES = frozenset({"splits", "stages", "recompute"})  # each declaration adds one
CHOICES = frozenset({"schedules", "zero_levels"})  # each declaration leaves fewer
_PINS = ("pipeline", "data", "tensor", "shard", "microbatch", "stages_per_rank")
_LIMITS = ("pipeline", "data", "tensor")


def constraints_of(declared: Iterable[Declared]) -> Constraints:
    """Return what some declarations mean together; of several for one place the last one holds."""
    last = {one.place: one for one in declared}
    constraints = Constraints()
    for one in last.values():
        constraints = _with(constraints, one)
    return replace(constraints, declared=tuple(last.values()))


def _with(constraints: Constraints, one: Declared) -> Constraints:
    before, value = getattr(constraints, one.field), one.value
    if one.field in RULES:
        value = (*before, one.value)
    elif one.field in CHOICES:
        value = tuple(choice for choice in before if choice in one.value)
    changes: dict[str, Any] = {one.field: value}
    return replace(constraints, **changes)


def allows(constraints: Constraints, arrangement: Arrangement) -> bool:
    """Whether an arrangement respects pins, limits and choices; memory and rules are not its."""
    pinned = all(getattr(constraints, name) in (None, getattr(arrangement, name)) for name in _PINS)
    limits = ((name, getattr(constraints, f"max_{name}")) for name in _LIMITS)
    below = all(most is None or getattr(arrangement, name) <= most for name, most in limits)
    buckets = constraints.bucket_bytes
    return (
        pinned
        and below
        and (arrangement.schedule in constraints.schedules or arrangement.pipeline == 1)
        and arrangement.zero in constraints.zero_levels
        and arrangement.precision is constraints.precision
        and constraints.global_batch in (None, arrangement.global_batch)
        and (arrangement.microbatches == 1 or not constraints.one_microbatch)
        and (_steps_once(arrangement) or not constraints.steps_once)
        and (arrangement.compressed_gradients in constraints.compression or arrangement.data == 1)
        and (not buckets or arrangement.bucket_bytes in buckets)
    )


def _steps_once(arrangement: Arrangement) -> bool:
    """Whether each number of a parameter is stepped by one data rank alone."""
    is_shared_out = arrangement.zero is not Zero.NONE and arrangement.shard == arrangement.data
    return arrangement.data == 1 or is_shared_out


def without_recompute(
    constraints: Constraints, modules: Iterable[str], *, origin: str
) -> Constraints | None:
    """Return the constraints with modules that do not run again; None where a rule wants that."""
    added = []
    for path in modules:
        modes = [pin.mode for pin in constraints.recompute if covers(pin.modules, path)]
        if modes and modes[-1] is not Recompute.NONE:
            return None
        rule = RecomputePin(modules=path, mode=Recompute.NONE)
        text = f"recompute none in {path}"
        place = f"recompute {path}"
        added.append(Declared(place=place, field="recompute", value=rule, text=text, origin=origin))
    return constraints_of((*constraints.declared, *added))


def covers(modules: str, path: str) -> bool:
    """Whether a pattern means a module: its path, or that of a module around it, matches."""
    around = accumulate(path.split("."), lambda outer, inner: f"{outer}.{inner}")
    return modules == "*" or any(fnmatchcase(outer, modules) for outer in around)
