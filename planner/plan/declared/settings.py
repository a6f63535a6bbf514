"""The table of a plan's constraints, and how each value is parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.toml_reading import nearest, parse_bytes
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    MemoryLimit,
    Objective,
    RecomputePin,
    SplitRule,
    StagePin,
    covers,
    read_budget,
    read_deadline,
    read_units,
)
from autopar.planner.precision import Precision

_MOST_TOLD = 12


def check_names(
    constraints: Constraints,
    graph: Graph,
    axes: GraphAxes,
    *,
    layers: int,
) -> None:
    """Raise one error for all names and stages in constraints that the model does not have."""
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
        known = axis_names(axes)
        if rule.axis not in known:
            yield f"the model has no axis {rule.axis!r}{_hint(rule.axis, known)}"
    if isinstance(rule, StagePin) and rule.stage >= layers:
        yield f"there is no stage {rule.stage}: {layers} layers make at most as many stages"


def axis_names(axes: GraphAxes) -> tuple[str, ...]:
    """Return the names of axes."""
    named = {name for name in axes.names.values() if not name.isdigit()}
    return tuple(sorted(named))


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(known[:_MOST_TOLD])}{', …' if len(known) > _MOST_TOLD else ''}"


Chosen = TypeVar("Chosen", bound=Enum)
_MOST = 10**9  # of rows, ranks: more is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSetting:
    """A constraint: its field, its parser, and its words."""

    field: str
    # parses a value of a TOML file or an option, with its place for messages
    read: Callable[[object, str], Any]
    say: str = "{name}={value}"


def declare(place: str, raw: object, *, origin: str, where: str) -> Declared:
    """Return a constraint parsed from a TOML value or an option's text."""
    setting = SETTINGS[place]
    value = setting.read(raw, where)
    text = setting.say.format(name=place.rpartition(".")[2], value=_told(raw))
    return Declared(place=place, field=setting.field, value=value, text=text, origin=origin)


def _told(raw: object) -> str:
    if isinstance(raw, list):
        return ", ".join(map(_told, raw))
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def read_count(value: object, where: str) -> int:
    """Return an integer from 1 on."""
    number = _number(value)
    if number is None or not 1 <= number <= _MOST:
        raise InputError(
            f"{value!r} is not a count", where=where, expected=f"a whole number from 1 to {_MOST}"
        )
    return number


def _number(value: object) -> int | None:
    """Return an integer, also from digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_memory(value: object, where: str) -> MemoryLimit:
    """Return the limit in "70 GiB" or "90%"."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return MemoryLimit(size_bytes=parse_bytes(value, where=where))
    try:
        share = float(value.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InputError(
            f"{value!r} is not a share", where=where, expected='above 0 and at most 100: "90%"'
        )
    return MemoryLimit(share=share)


def read_tolerance(value: object, where: str) -> float:
    """Return the fraction in "3%"; 0 needs no sign."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1 or not (text.endswith("%") or share == 0):
        raise InputError(
            f"{value!r} is not a share of the step",
            where=where,
            expected='"3%", or 0 for the fastest plan however complex',
        )
    return share


def read_name(value: object, where: str, known: type[Chosen]) -> Chosen:
    """Return the enum member with this name."""
    names = {str(one.value): one for one in known}
    if not isinstance(value, str) or value not in names:
        raise InputError(
            f"{value!r} is not known",
            where=where,
            expected=f"one of {', '.join(names)}",
            fix=nearest(str(value), names),
        )
    return names[value]


def _named(known: type[Chosen]) -> Callable[[object, str], Chosen]:
    return lambda value, where: read_name(value, where, known)


def _read_zero(value: object, where: str) -> Zero:
    level = _number(value)
    if level is None or level not in tuple(Zero):
        raise InputError(f"{value!r} is not a ZeRO level", where=where, expected="0, 1, 2 or 3")
    return Zero(level)


def _read_schedule(value: object, where: str) -> ScheduleKind:
    return read_name(value, where, ScheduleKind)


def _alone(read: Callable[[object, str], Any]) -> Callable[[object, str], tuple[Any, ...]]:
    return lambda value, where: (read(value, where),)


def _each(read: Callable[[object, str], Any]) -> Callable[[object, str], tuple[Any, ...]]:
    def read_list(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise InputError(
                f"{value!r} is not a list of choices", where=where, expected="[one, or, several]"
            )
        return tuple(read(one, where) for one in value)

    return read_list


def _read_compression(value: object, where: str) -> tuple[bool, ...]:
    meanings = {True: (True,), False: (False,), "either": (False, True)}
    if not isinstance(value, (bool, str)) or value not in meanings:
        raise InputError(f"{value!r} is no choice", where=where, expected='true, false or "either"')
    return meanings[value]


def _read_truth(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is no choice", where=where, expected="true or false")
    return value


def _read_bucket(value: object, where: str) -> int:
    return parse_bytes(value, where=where)


SETTINGS: Mapping[str, DemandSetting] = MappingProxyType(
    {
        "objective": DemandSetting(
            field="objective", read=_named(Objective), say="objective {value}"
        ),
        "tolerance": DemandSetting(
            field="tolerance", read=read_tolerance, say="the simplest plan within {value}"
        ),
        "precision": DemandSetting(
            field="precision", read=_named(Precision), say="precision {value}"
        ),
        "global_batch": DemandSetting(
            field="global_batch", read=read_count, say="a global batch of {value}"
        ),
        "samples": DemandSetting(field="samples", read=read_units, say="{value} samples in all"),
        "tokens": DemandSetting(field="tokens", read=read_units, say="{value} tokens in all"),
        "deadline": DemandSetting(
            field="deadline_seconds", read=read_deadline, say="a deadline of {value}"
        ),
        "budget": DemandSetting(
            field="budget_usd", read=read_budget, say="a budget of {value} USD"
        ),
        "pins.pp": DemandSetting(field="pipeline", read=read_count),
        "pins.dp": DemandSetting(field="data", read=read_count),
        "pins.tp": DemandSetting(field="tensor", read=read_count),
        "pins.shard": DemandSetting(field="shard", read=read_count),
        "pins.microbatch": DemandSetting(field="microbatch", read=read_count),
        "pins.stages_per_rank": DemandSetting(field="stages_per_rank", read=read_count),
        "pins.zero": DemandSetting(field="zero_levels", read=_alone(_read_zero)),
        "pins.schedule": DemandSetting(field="schedules", read=_alone(_read_schedule)),
        "limits.pp": DemandSetting(field="max_pipeline", read=read_count, say="at most pp={value}"),
        "limits.dp": DemandSetting(field="max_data", read=read_count, say="at most dp={value}"),
        "limits.tp": DemandSetting(field="max_tensor", read=read_count, say="at most tp={value}"),
        "limits.memory": DemandSetting(
            field="memory", read=read_memory, say="at most {value} a device"
        ),
        "choices.schedules": DemandSetting(
            field="schedules", read=_each(_read_schedule), say="schedules {value}"
        ),
        "choices.zero": DemandSetting(
            field="zero_levels", read=_each(_read_zero), say="ZeRO levels {value}"
        ),
        "choices.compressed_gradients": DemandSetting(
            field="compression", read=_read_compression, say="compressed gradients: {value}"
        ),
        "choices.microbatch_statistics": DemandSetting(
            field="statistics_apart", read=_read_truth, say="statistics of microbatches: {value}"
        ),
        "choices.bucket_sizes": DemandSetting(
            field="bucket_bytes", read=_each(_read_bucket), say="buckets of {value}"
        ),
    }
)


def keys_of(section: str) -> tuple[str, ...]:
    """Return the keys of a section of a constraints file; "" is its top."""
    places = (place.rpartition(".") for place in SETTINGS)
    return tuple(key for own, _, key in places if own == section)
