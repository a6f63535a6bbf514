"""Turns a constraints file (TOML, documented in docs/constraints-file.md) into declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autopar.planner.cluster import reading
from autopar.planner.cluster.places import TOP, line_of, placed
from autopar.planner.cluster.toml_text import parsed
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.given import read_given
from autopar.planner.plan.declared.constraints import Declared, RecomputePin, SplitRule, StagePin
from autopar.planner.plan.declared.settings import declare, keys_of, read_name

SECTIONS = ("pins", "limits", "choices")
Rule = SplitRule | StagePin | RecomputePin


def read_constraints(path: Path) -> tuple[Declared, ...]:
    """Return what a file declares."""
    source = read_given(path, what="the constraints file")
    return parse_constraints(source, where=str(path))


def parse_constraints(source: str, *, where: str) -> tuple[Declared, ...]:
    """Return what a text declares; `where` names the text in messages."""
    table = parsed(source, where=where)

    def origin(place: str) -> str:
        line = line_of(source, place)
        return f"{where}, line {line}" if line else where

    with placed(source, where=where):
        return tuple(_declared(table, origin))


def _declared(table: Mapping[str, object], origin: Callable[[str], str]) -> Iterator[Declared]:
    _refuse_misplaced(table)
    reading.refuse_unknown(table, (*keys_of(""), *SECTIONS, *_RULES), where=TOP)
    for key in keys_of(""):
        if key in table:
            yield declare(key, table[key], origin=origin(f"{TOP}.{key}"), where=f"{TOP}.{key}")
    for section in SECTIONS:
        own = reading.subtable(table.get(section, {}), where=section)
        reading.refuse_unknown(own, keys_of(section), where=section)
        for key, value in own.items():
            place = f"{section}.{key}"
            yield declare(place, value, origin=origin(place), where=place)
    for section in _RULES:
        yield from _rules(section, table.get(section, []), origin)


def _refuse_misplaced(table: Mapping[str, object]) -> None:
    """Refuse a cluster file, and keys of a section that stand before any section."""
    if "nodes" in table:
        raise InputError("this is a cluster file", fix="give it by --cluster")
    for key in table:
        section = next((one for one in SECTIONS if key in keys_of(one)), None)
        if section is not None:
            found = f"{key!r} stands before any section"
            raise InputError(found, where=TOP, fix=f"put it below a line [{section}]")


def _rules(section: str, value: object, origin: Callable[[str], str]) -> Iterator[Declared]:
    if not isinstance(value, list):
        raise InputError(
            f"{section} is not a list of rules", where=section, fix=f"write it as [[{section}]]"
        )
    keys, read = _RULES[section]
    for number, one in enumerate(value, start=1):
        where = f"{section} {number}"
        table = reading.subtable(one, where=where)
        reading.refuse_unknown(table, keys, where=where)
        rule, text = read(table, where)
        yield Declared(place=where, field=section, value=rule, text=text, origin=origin(where))


def _split(table: Mapping[str, object], where: str) -> tuple[Rule, str]:
    axis = reading.text(table, "axis", where=where)
    modules = reading.text(table, "modules", where=where, default="*")
    words = {"require": True, "forbid": False}
    is_required = reading.choice(table, "rule", words, where=where)
    text = f"{'split' if is_required else 'never split'} {axis} in {modules}"
    return SplitRule(modules=modules, axis=axis, is_required=is_required), text


def _stage(table: Mapping[str, object], where: str) -> tuple[Rule, str]:
    modules = reading.text(table, "modules", where=where)
    stage = reading.required(table, "stage", where=where)
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise InputError(f"{stage!r} is not a stage", where=f"{where}.stage", expected="0, 1, 2, …")
    return StagePin(modules=modules, stage=stage), f"{modules} on stage {stage}"


def _recompute(table: Mapping[str, object], where: str) -> tuple[Rule, str]:
    modules = reading.text(table, "modules", where=where)
    mode = read_name(reading.required(table, "mode", where=where), f"{where}.mode", Recompute)
    return RecomputePin(modules=modules, mode=mode), f"recompute {mode} in {modules}"


_RULES: Mapping[
    str, tuple[tuple[str, ...], Callable[[Mapping[str, object], str], tuple[Rule, str]]]
] = {
    "splits": (("axis", "modules", "rule"), _split),
    "stages": (("modules", "stage"), _stage),
    "recompute": (("modules", "mode"), _recompute),
}
