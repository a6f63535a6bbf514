"""Reads and writes plan.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from autopar.planner.cluster.cluster import Cluster, ClusterOrigin, LinkLevel, Machine, Unit
from autopar.planner.costs.prediction import Arrangement, Prediction
from autopar.planner.errors import InputError
from autopar.planner.files import (
    MOST_DEVICES,
    Degree,
    Elements,
    check_format,
    check_writable,
    damaged,
    is_written,
    read_given,
    validation_messages,
    write_whole,
)
from autopar.planner.graph.layouts import Layout, LayoutKind, OpLayout, ParameterLayout
from autopar.planner.plan.declared.file import DeclaredDocument, declared_document, declared_of
from autopar.planner.plan.files.consistency import faults_of
from autopar.planner.plan.plan import (
    FORMAT,
    ClassLayouts,
    ConversionLine,
    Model,
    PlannedCount,
    PlannedMachines,
    PlannedStage,
    Proof,
    RunnerUp,
    SplitLine,
    StoredPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """A number of equal consecutive nodes."""

    count: Degree
    node: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """A number of equal consecutive units; a unit is a group of ranks that a link joins."""

    count: Degree
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDocument:
    """A level of the cluster's links."""

    name: str
    units: tuple[UnitRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDocument:
    """A cluster in a file; equal consecutive nodes are stored once."""

    nodes: tuple[NodeRun, ...]
    levels: tuple[LevelDocument, ...]
    origin: ClusterOrigin


def cluster_document(cluster: Cluster) -> ClusterDocument:
    """Return a cluster in the form of a file."""
    return ClusterDocument(
        nodes=tuple(
            NodeRun(count=len(list(run)), node=node) for node, run in groupby(cluster.nodes)
        ),
        levels=tuple(
            LevelDocument(name=level.name, units=_unit_runs(level.units))
            for level in cluster.levels
        ),
        origin=cluster.origin,
    )


def _unit_runs(units: Iterable[Unit]) -> tuple[UnitRun, ...]:
    return tuple(UnitRun(count=len(list(run)), unit=unit) for unit, run in groupby(units))


def cluster_of(document: ClusterDocument) -> Cluster:
    """Return the cluster in a document; raises ValueError if it is invalid."""
    size = sum(run.count * run.node.devices for run in document.nodes)
    if not 1 <= size <= MOST_DEVICES:  # checked before an object is made for each node
        raise ValueError(f"cluster.nodes: {size} devices, expected 1 to {MOST_DEVICES}")
    for number, level in enumerate(document.levels):
        ranks = sum(run.count * run.unit.ranks for run in level.units)
        if ranks != size:
            raise ValueError(f"cluster.levels.{number}: {ranks} ranks for {size} devices")
    return Cluster(
        nodes=tuple(chain.from_iterable(repeat(run.node, run.count) for run in document.nodes)),
        levels=tuple(
            LinkLevel(
                name=level.name,
                units=tuple(
                    chain.from_iterable(repeat(run.unit, run.count) for run in level.units)
                ),
            )
            for level in document.levels
        ),
        origin=document.origin,
    )


# A layout as people write it: I, R, P, or S(axis@dim) where a tensor is split.
LayoutText = Annotated[str, StringConstraints(pattern=r"^([IRP]|S\([\w.]+@\d{1,4}\))$")]


class LayoutRow(NamedTuple):
    """How one op is split, as a list."""

    letter: str
    axis: str
    needs: tuple[LayoutText, ...]
    gives: tuple[LayoutText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDocument:
    """The layouts of all layers of a class: in words, and op by op."""

    name: str
    first: str
    layers: Elements
    ops: Elements
    splits: tuple[SplitLine, ...]
    conversions: tuple[ConversionLine, ...]
    rows: tuple[LayoutRow, ...]


def _class_document(one: ClassLayouts, layouts: Iterable[OpLayout]) -> ClassDocument:
    rows = (
        LayoutRow(own.letter, own.axis, tuple(map(str, own.needs)), tuple(map(str, own.gives)))
        for own in layouts
    )
    return ClassDocument(**_values(one, ClassLayouts), rows=tuple(rows))


def _op_layout(row: LayoutRow) -> OpLayout:
    needs, gives = (tuple(map(_layout, texts)) for texts in (row.needs, row.gives))
    return OpLayout(letter=row.letter, axis=row.axis, needs=needs, gives=gives)


def _layout(text: str) -> Layout:
    if len(text) == 1:
        return Layout(LayoutKind(text))
    axis, _, dim = text[2:-1].partition("@")
    return Layout(LayoutKind.SPLIT, axis, int(dim))


def _texts(own: Iterable[ParameterLayout]) -> dict[str, str]:
    return {one.name: str(one.layout) for one in own}


def _named_layouts(texts: Mapping[str, str]) -> tuple[ParameterLayout, ...]:
    return tuple(ParameterLayout(name=name, layout=_layout(text)) for name, text in texts.items())


def _values(one: object, kind: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(kind)}


FILE_NAME = "plan.json"
_PLAN_AGAIN = "plan again with `autopar plan`"
MOST_CHARACTERS = 100_000  # of one string
# `order` matters only in the search: a plan's cluster has its nodes in the chosen order.
_NO_ORDER: dict[str, Any] = {"arrangement": {"order"}}
_OF_THE_SEARCH: dict[str, Any] = {
    **_NO_ORDER,
    "fastest": _NO_ORDER,
    "runners_up": {"__all__": _NO_ORDER},
    "curve": {"__all__": _NO_ORDER},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A plan in a file, its fields in this order."""

    format: int
    autopar: str
    model: Model
    machines: PlannedMachines
    objective: str
    constraints: tuple[DeclaredDocument, ...]
    arrangement: Arrangement
    stages: tuple[PlannedStage, ...]
    layouts: tuple[ClassDocument, ...]
    parameters: dict[str, LayoutText]
    crossing: dict[str, LayoutText]
    prediction: Prediction
    proof: Proof
    fastest: RunnerUp | None = None
    runners_up: tuple[RunnerUp, ...]
    curve: tuple[PlannedCount, ...] = ()
    cluster: ClusterDocument


class _PlanFile(BaseModel):
    """Applies pydantic's strictness to the dataclasses: no coercion, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        str_max_length=MOST_CHARACTERS,
        defer_build=True,
    )

    plan: PlanDocument


def write_plan(plan: StoredPlan, path: Path) -> None:
    """Write a plan into a file, whole or not at all."""
    write_whole(path, plan_text(plan), what="the plan")


def refuse_foreign(path: Path) -> None:
    """Raise for a path that cannot be written, or an existing file that is not a plan."""
    check_writable(path)
    if not path.exists():
        return
    try:
        is_plan = is_written(json.loads(read_given(path, what="the plan")))
    except (InputError, ValueError, RecursionError):
        is_plan = False
    if not is_plan:
        raise InputError(
            "a file that is not a plan is in the way", where=str(path), fix="-o another-folder"
        )


def read_plan(path: Path) -> StoredPlan:
    """Return the plan in a file, or in plan.json of a folder."""
    path = path / FILE_NAME if path.is_dir() else path
    if path.suffix == ".py":
        raise InputError(
            f"{path} is a Python file, not a plan", expected=_EXPECTED, fix=_near(path)
        )
    source = read_given(path, what="the plan", expected=_EXPECTED, fix=_near(path))
    return parse_plan(source, where=str(path))


def _near(path: Path) -> str:
    """Return a hint: the plan beside a wrong path, or the command that writes one."""
    there = path.parent / FILE_NAME
    if path.parent.is_dir() and there != path and there.is_file():
        return f"did you mean {there}?"
    return "autopar plan MODEL --gpus N writes one"


_EXPECTED = f"{FILE_NAME} as `autopar plan` writes it"


def plan_text(plan: StoredPlan) -> str:
    """Return the text of plan.json; its three outer levels are on separate lines."""
    written = {
        "constraints": tuple(map(declared_document, plan.constraints)),
        "layouts": tuple(map(_class_document, plan.classes, plan.layouts)),
        "parameters": _texts(plan.parameters),
        "crossing": _texts(plan.crossing),
        "cluster": cluster_document(plan.cluster),
    }
    values: dict[str, Any] = _values(plan, PlanDocument)
    document = PlanDocument(**values | written)
    dumped = _PlanFile(plan=document).model_dump(mode="json", exclude={"plan": _OF_THE_SEARCH})
    return "".join(_lines(dumped["plan"], depth=0)) + "\n"


def summary(plan: StoredPlan) -> Mapping[str, object]:
    """Return plan.json's data without layouts, for programs."""
    document: dict[str, object] = json.loads(plan_text(plan))
    return {key: value for key, value in document.items() if key != "layouts"}


def _lines(value: Any, *, depth: int) -> Iterator[str]:
    """Yield a JSON value with its outer levels on separate lines."""
    is_table, is_list = isinstance(value, dict), isinstance(value, (list, tuple))
    if not value or not (is_table or is_list) or depth == _DEPTH:
        # nan could not be read back
        yield json.dumps(value, separators=(",", ":"), allow_nan=False)
        return
    opening, closing = "{}" if is_table else "[]"
    items = value.items() if is_table else (("", item) for item in value)
    margin = "\n" + " " * (depth + 1)
    separator = opening
    for key, item in items:
        yield f"{separator}{margin}{json.dumps(key)}: " if is_table else f"{separator}{margin}"
        yield from _lines(item, depth=depth + 1)
        separator = ","
    yield "\n" + " " * depth + closing


_DEPTH = 3


def parse_plan(source: str, *, where: str) -> StoredPlan:
    """Return the plan in a text; `where` names it in messages."""
    _check_envelope(source, where=where)
    try:
        document = _PlanFile.model_validate_json(f'{{"plan":{source}}}').plan
    except ValidationError as error:
        raise _damaged(validation_messages(error), where) from None
    values = _values(document, PlanDocument)
    try:
        values |= {
            "constraints": tuple(map(declared_of, document.constraints)),
            "classes": tuple(
                ClassLayouts(**_values(one, ClassLayouts)) for one in document.layouts
            ),
            "layouts": tuple(tuple(map(_op_layout, one.rows)) for one in document.layouts),
            "parameters": _named_layouts(document.parameters),
            "crossing": _named_layouts(document.crossing),
            "cluster": cluster_of(document.cluster),
        }
        plan = StoredPlan(**values)
    except ValueError as error:
        raise _damaged([str(error)], where) from None
    faults = list(faults_of(plan))
    if faults:
        raise _damaged(faults, where)
    return plan


def _check_envelope(source: str, *, where: str) -> None:
    """Raise for invalid JSON, for other programs' files, and for other versions' formats."""
    if not source.strip():
        raise InputError("the plan is empty", where=where, fix=_PLAN_AGAIN)
    try:
        table = json.loads(source)
    except (ValueError, RecursionError) as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            "the plan is damaged or cut off: it is not valid JSON",
            where=f"{where}{place}",
            expected=_EXPECTED,
            fix=_PLAN_AGAIN,
        ) from None
    if not is_written(table):
        raise InputError("this JSON file is not a plan", where=where, expected=_EXPECTED)
    check_format(table, FORMAT, what="this plan", where=where, fix=_PLAN_AGAIN)


def _damaged(faults: list[str], where: str) -> InputError:
    return damaged(faults, what="the plan was", where=where, fix=_PLAN_AGAIN)
