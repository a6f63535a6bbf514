"""A user's demands on a plan: as declared, and as the search reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Self

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.toml_reading import FIGURE
from autopar.planner.costs.prediction import Arrangement, Offload, Prediction, Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Compile
from autopar.planner.precision import (
    LEAST_OF_PART,
    LOCAL_STEPS,
    Allowed,
    Compression,
    Float8,
    Outer,
    Precision,
)


def minimal_conflict(
    constraints: Sequence[Declared], is_feasible: Callable[[Sequence[Declared]], bool]
) -> tuple[Declared, ...]:
    """Return constraints that are infeasible together, and feasible without any one of them.

    Each is left out in turn, for good if the rest stays infeasible. Leaving one out must never make
    constraints infeasible. Returns () if nothing is feasible even without constraints.
    """
    conflict = tuple(constraints)
    assert not is_feasible(conflict), "there is no conflict among feasible constraints"
    for one in constraints:
        rest = tuple(other for other in conflict if other is not one)
        if not is_feasible(rest):
            conflict = rest
    return conflict


def conflict_text(conflict: Sequence[Declared]) -> str:
    """Return a conflict as one phrase: "tp=8 (--pin) and at most tp=4 (--max-tp)"."""
    *first, last = map(str, conflict)
    return f"{', '.join(first)} and {last}" if first else last


_COUNTS: Mapping[str, float] = MappingProxyType(
    {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
)
_TIMES: Mapping[str, float] = MappingProxyType(
    {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0, "w": 604800.0}
)
_MONEY: Mapping[str, float] = MappingProxyType({"": 1.0, "USD": 1.0, "$": 1.0, "k": 1e3, "M": 1e6})


def read_units(value: object, where: str) -> int:
    """Return the number of rows or tokens in "10B" or "300_000"."""
    number = _read(value, _COUNTS, where=where, expected='a number such as "10B" or "500M"')
    if number < 1:
        raise InputError(f"{value!r} is less than one", where=where)
    return round(number)


def read_deadline(value: object, where: str) -> float:
    """Return the seconds in "24h"."""
    return _read(value, _TIMES, where=where, expected='a time such as "24h", "90min" or "3d"')


def read_budget(value: object, where: str) -> float:
    """Return the US dollars in "500" or "2k"."""
    return _read(value, _MONEY, where=where, expected='US dollars, such as "500" or "2k"')


def _read(value: object, units: Mapping[str, float], *, where: str, expected: str) -> float:
    match = FIGURE.fullmatch(str(value))
    is_read = match is not None and match[2] in units and not isinstance(value, bool)
    number = float(match[1].replace("_", "")) * units[match[2]] if match and is_read else math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{value!r} cannot be read", where=where, expected=expected)
    return number


class Objective(StrEnum):
    """The quantity that the best plan minimises."""

    _value_: str
    words: str  # for the least value
    best: str  # for the plan that has the least value
    memory_alone: bool  # the step's time does not count, and the tolerance does not apply
    minimised: Callable[[Prediction, float], float]  # of a prediction and the cost per time

    # fmt: off
    STEP_TIME = (
        "step-time", "the shortest step", "the fastest", False, lambda plan, _: plan.step_seconds,
    )
    MEMORY = (
        "memory", "the least memory on the fullest device", "the one of least memory", True,
        lambda plan, _: plan.peak_memory.device_bytes,
    )
    COST = (
        "cost", "the cheapest step", "the cheapest", False,
        lambda plan, second: second * plan.step_seconds,
    )
    # fmt: on

    def __new__(cls, name: str, *row: Any) -> Self:
        """Return an objective with the columns of its row."""
        one = str.__new__(cls, name)
        one._value_ = name
        one.words, one.best, one.memory_alone, one.minimised = row
        return one


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The memory limit of a rank: bytes, or a fraction of its device's memory."""

    size_bytes: int | None = None
    share: float | None = None

    def bytes_of(self, device_bytes: int) -> int:
        """Return the limit on a device, at most its memory."""
        if self.share is not None:
            return int(device_bytes * self.share)
        return min(self.size_bytes or device_bytes, device_bytes)


# The default limit. Of the 54 published runs that report memory, 95 % used at most 16 % more than
# predicted (docs/accuracy.md): 0.86 leaves room for that.
DEFAULT_MEMORY = MemoryLimit(share=0.86)
DEFAULT_HOST_MEMORY = MemoryLimit(share=0.8)  # the system and data loaders use the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """An axis that ops of some modules must, or must not, be split along."""

    modules: str  # pattern of module paths; "*" for all
    axis: str  # its name
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePin:
    """Modules whose layers must be on one stage."""

    modules: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePin:
    """A recompute mode that the layers of some modules must have."""

    modules: str
    mode: Recompute


class HostSaving(StrEnum):
    """When layers without a rule may save tensors for their backward in the host's memory."""

    NEVER = "never"
    IF_FASTER = "if it is faster than to compute it again"
    ALWAYS = "always"  # no plan fits otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A constraint as it was written; `value` belongs to a field of Constraints."""

    place: str  # its place in a constraints file, "pins.tp"; rules are numbered, "splits 2"
    field: str
    value: Any  # of the field's type, or one element if the field is a list of rules
    text: str  # "tp=8"
    origin: str  # "--pin" or "constraints.toml, line 3"

    def __str__(self) -> str:
        return f"{self.text} ({self.origin})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """All constraints of the search; None and empty rules mean a free choice."""

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
    host_memory: MemoryLimit | None = None  # for a device's share of its host's memory
    objective: Objective = Objective.STEP_TIME
    tolerance: float = 0.03  # of the fastest step; the simplest plan within it is chosen
    schedules: tuple[ScheduleKind, ...] = tuple(ScheduleKind)
    zero_levels: tuple[Zero, ...] = tuple(Zero)
    precision: Precision = Precision.BF16
    compile: Compile | None = None  # None: on GPUs whatever is faster, on CPUs nothing
    float8: Float8 = Float8.NONE  # changes what is learnt, so it must be asked for
    offloads: tuple[Offload, ...] = tuple(Offload)  # on CPUs none, unless one is declared
    global_batch: int | None = None
    samples: int | None = None  # rows of the whole training
    tokens: int | None = None  # of the whole training
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    # of gradients; changes what is learnt, so it must be allowed
    compression: tuple[Compression, ...] = (Compression.NONE,)
    allowed: tuple[Allowed, ...] = ()
    bucket_bytes: tuple[int, ...] = ()
    sync_every: int | None = None
    outer: Outer = Outer.NESTEROV  # of plans with local steps
    outer_parts: int = 1
    splits: tuple[SplitRule, ...] = ()
    stages: tuple[StagePin, ...] = ()
    recompute: tuple[RecomputePin, ...] = ()
    # rows depend on each other: the tensor axis may split a batch, the data axis may not
    shares_rows: bool = False
    host_saving: HostSaving = HostSaving.IF_FASTER  # on CPUs never
    statistics_apart: bool = False  # batch norms may take statistics per microbatch
    one_microbatch: bool = False  # batch norms need all rows of a data rank at once
    steps_once: bool = False  # no two data ranks update the same element of a parameter
    declared: tuple[Declared, ...] = ()


RULES = frozenset({"splits", "stages", "recompute"})  # each declaration adds one
CHOICES = frozenset({"schedules", "zero_levels", "offloads"})  # each declaration leaves fewer
_PINS = ("pipeline", "data", "tensor", "shard", "microbatch", "stages_per_rank")
_LIMITS = ("pipeline", "data", "tensor")


def constraints_of(declared: Iterable[Declared]) -> Constraints:
    """Combine declarations; the last one for a place applies."""
    last = {one.place: one for one in declared}
    constraints = Constraints()
    for one in last.values():
        constraints = _with(constraints, one)
    constraints = replace(constraints, declared=tuple(last.values()))
    _check_local_steps(constraints)
    return constraints if constraints.float8 is Float8.NONE else _compiled(constraints)


def _compiled(constraints: Constraints) -> Constraints:
    """Return the constraints with compiled layers, which float8 needs; raise if they forbid it."""
    suited = {"compile": (None, Compile.LAYERS), "precision": constraints.float8.precisions}
    for field in (one for one, among in suited.items() if getattr(constraints, one) not in among):
        both = [one for one in constraints.declared if one.field in ("float8", field)]
        raise InputError(
            f"{conflict_text(both)} exclude each other",
            expected=f"{' or '.join(constraints.float8.precisions)}, compile layers: float8 is "
            "slower uncompiled, and its casts stand between messages and products",
            fix="leave one of them out",
        )
    return replace(constraints, compile=Compile.LAYERS)


def _check_local_steps(constraints: Constraints) -> None:
    """Raise if constraints demand local steps, but exclude them or demand too few for all parts."""
    steps, least = constraints.sync_every, LEAST_OF_PART * constraints.outer_parts
    if constraints.outer_parts > 1 and steps is not None and steps < least:
        both = [one for one in constraints.declared if one.field in ("sync_every", "outer_parts")]
        raise InputError(
            f"{conflict_text(both)}: each part needs {LEAST_OF_PART} local steps",
            fix=f"take --sync-every {least} or more, or fewer --outer-parts",
        )
    if 1 in local_steps(constraints):
        return
    is_lossy = all(one.keeps_lost for one in compressions(constraints))
    is_there = all(one.has_states for one in constraints.offloads)
    rivals = {
        "compression": (is_lossy, "what compression loses is not kept for each replica"),
        "precision": (constraints.precision.scales_loss, "in fp16 all ranks share a loss scale"),
        "offloads": (is_there, "the outer step needs the optimizer on the device"),
    }
    for field, (is_rival, why) in rivals.items():
        if is_rival:
            both = [one for one in constraints.declared if one.field in ("sync_every", field)]
            what = f"{conflict_text(both)} exclude each other: {why}"
            raise InputError(what, fix="leave one of them out")


def _with(constraints: Constraints, one: Declared) -> Constraints:
    before, value = getattr(constraints, one.field), one.value
    if one.field in RULES:
        value = (*before, one.value)
    elif one.field in CHOICES:
        value = tuple(choice for choice in before if choice in one.value)
    changes: dict[str, Any] = {one.field: value}
    return replace(constraints, **changes)


def allows(constraints: Constraints, arrangement: Arrangement) -> bool:
    """Whether an arrangement meets pins, limits and choices; memory and rules are not checked."""
    pinned = all(getattr(constraints, name) in (None, getattr(arrangement, name)) for name in _PINS)
    limits = ((name, getattr(constraints, f"max_{name}")) for name in _LIMITS)
    below = all(most is None or getattr(arrangement, name) <= most for name, most in limits)
    buckets = constraints.bucket_bytes
    # each element of a parameter is updated by one data rank alone
    is_shared_out = arrangement.zero.divides_optimizer and arrangement.shard == arrangement.data
    return (
        pinned
        and below
        and (arrangement.schedule in constraints.schedules or arrangement.pipeline == 1)
        and arrangement.zero in constraints.zero_levels
        and arrangement.precision is constraints.precision
        and constraints.compile in (None, arrangement.compile)
        and arrangement.float8 is constraints.float8
        and arrangement.offload in constraints.offloads
        and constraints.global_batch in (None, arrangement.global_batch)
        and (arrangement.microbatches == 1 or not constraints.one_microbatch)
        and (is_shared_out or arrangement.data == 1 or not constraints.steps_once)
        and (arrangement.compression in compressions(constraints) or arrangement.data == 1)
        and (not buckets or arrangement.bucket_bytes in buckets)
        and arrangement.sync_every in local_steps(constraints)
        and (arrangement.outer is constraints.outer or not arrangement.is_local)
        and arrangement.outer_parts == (constraints.outer_parts if arrangement.is_local else 1)
    )


def local_steps(constraints: Constraints) -> tuple[int, ...]:
    """Return the allowed numbers of local steps; 1 stands for none."""
    if Allowed.LOCAL_STEPS in constraints.allowed:
        usual = max(LOCAL_STEPS, LEAST_OF_PART * constraints.outer_parts)
        return tuple(sorted({1, constraints.sync_every or usual}))
    return (constraints.sync_every or 1,)


def compressions(constraints: Constraints) -> tuple[Compression, ...]:
    """Return how gradients may be compressed, without repetition."""
    by_name = (one for one in Compression if one.value in constraints.allowed)
    return tuple(dict.fromkeys((*constraints.compression, *by_name)))


def covers(modules: str, path: str) -> bool:
    """Whether a pattern matches a module's path, or that of a module around it."""
    around = accumulate(path.split("."), lambda outer, inner: f"{outer}.{inner}")
    return modules == "*" or any(fnmatchcase(outer, modules) for outer in around)


_MOST_LISTED = 12  # names in a hint


def check_names(
    constraints: Constraints,
    graph: Graph,
    axes: GraphAxes,
    *,
    layers: int,
) -> None:
    """Raise one error with all names and stages in constraints that the model does not have."""
    faults = [
        (one.origin, fault)
        for one in constraints.declared
        for fault in _faults(one, graph, axes, layers=layers)
    ]
    if not faults:
        return
    found = [fault for _, fault in faults]
    raise InputError(
        found[0] if len(found) == 1 else "\n".join(f"- {fault}" for fault in found),
        where="; ".join(dict.fromkeys(origin for origin, _ in faults)),
        fix="autopar inspect MODEL shows the modules and axes of a model",
    )


def _faults(one: Declared, graph: Graph, axes: GraphAxes, *, layers: int) -> Iterator[str]:
    rule = one.value
    if not isinstance(rule, (SplitRule, StagePin, RecomputePin)):
        return
    paths = tuple(dict.fromkeys(call.path for call in graph.calls.values() if call.path))
    if not any(covers(rule.modules, path) for path in paths):
        yield f"the model has no module {rule.modules!r}{_hint(rule.modules, paths)}"
    if isinstance(rule, SplitRule):
        known = tuple(sorted({name for name in axes.names.values() if not name.isdigit()}))
        if rule.axis not in known:
            yield f"the model has no axis {rule.axis!r}{_hint(rule.axis, known)}"
    if isinstance(rule, StagePin) and rule.stage >= layers:
        yield f"there is no stage {rule.stage}: {layers} layers make at most as many stages"


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(known[:_MOST_LISTED])}{', …' * (len(known) > _MOST_LISTED)}"
