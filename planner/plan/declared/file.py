"""Turns a constraints file, options and plan.json's rows into declarations, and checks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from pydantic import JsonValue, TypeAdapter, ValidationError

from autopar.planner.cluster import toml_reading as reading
from autopar.planner.cluster.toml_reading import TOP, line_of, nearest, parsed, placed
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.files import read_given
from autopar.planner.plan.declared.constraints import (
    RULES,
    Constraints,
    Declared,
    RecomputePin,
    SplitRule,
    StagePin,
    constraints_of,
)
from autopar.planner.plan.declared.settings import (
    BY_KEYWORD,
    SECTIONS,
    declare,
    keys_of,
    option_of,
    read_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDocument:
    """A constraint in a file; the field determines the type of the value."""

    place: str
    field: str
    value: JsonValue
    text: str
    origin: str


def declared_document(one: Declared) -> DeclaredDocument:
    """Return a constraint in the form that plan.json has."""
    return DeclaredDocument(
        place=one.place,
        field=one.field,
        value=_adapter(one.field).dump_python(one.value, mode="json"),
        text=one.text,
        origin=one.origin,
    )


def declared_of(document: DeclaredDocument) -> Declared:
    """Return the constraint in a row of plan.json; raise ValueError if it is invalid."""
    if document.field not in _FIELDS:
        raise ValueError(f"constraints: there is no {document.field!r} to declare")
    try:
        value = _adapter(document.field).validate_json(json.dumps(document.value), strict=True)
    except ValidationError:
        raise ValueError(
            f"constraints: {document.value!r} is no value of {document.field}"
        ) from None
    return Declared(
        place=document.place,
        field=document.field,
        value=value,
        text=document.text,
        origin=document.origin,
    )


_FIELDS = frozenset(field.name for field in fields(Constraints)) - {"declared"}


def _adapter(field: str) -> TypeAdapter[Any]:
    """Return the parser of a field's values, or of one of its rules."""
    hint = get_type_hints(Constraints)[field]
    return TypeAdapter(get_args(hint)[0] if field in RULES else hint)


Rule = SplitRule | StagePin | RecomputePin


def read_constraints(path: Path) -> tuple[Declared, ...]:
    """Return the declarations in a constraints file."""
    source = read_given(path, what="the constraints file")
    return parse_constraints(source, where=str(path))


def parse_constraints(source: str, *, where: str) -> tuple[Declared, ...]:
    """Return the declarations in a text; `where` names it in messages."""
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
    """Raise for a cluster file, and for keys that are not in their section."""
    if "nodes" in table:
        raise InputError("this is a cluster file", fix="give it by --cluster")
    for key in table:
        section = next((one for one in SECTIONS if key in keys_of(one)), None)
        if section is not None:
            found = f"{key!r} comes before any section"
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


# other names for keys of --pin: the error names the right one
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "pipeline": "pp",
        "data": "dp",
        "tensor": "tp",
        "fsdp": "zero",
        "batch": "microbatch",
        "batch_size": "microbatch",
    }
)


def gathered_constraints(
    pins: Sequence[str], demands: Mapping[str, object], file: Path | None
) -> Constraints:
    """Return all that was declared; options and keywords override the file.

    `demands` are values by the keywords of `DemandOptions`; None where one was not given.
    """
    declared = [] if file is None else list(read_constraints(file))
    declared += parse_pins(pins)
    for keyword, value in demands.items():
        if value is not None:
            option = option_of(keyword)
            declared.append(declare(BY_KEYWORD[keyword].place, value, origin=option, where=option))
    return constraints_of(declared)


def parse_pins(texts: Iterable[str], *, option: str = "--pin") -> tuple[Declared, ...]:
    """Return the pins in texts such as "dp=2,tp=4"."""
    pins: dict[str, Declared] = {}
    for text in texts:
        for pair in text.split(","):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not key or not value or "=" in value:
                raise InputError(
                    f"{option} {text!r} is not of the form key=value", fix=f"{option} dp=2,tp=4"
                )
            name = key.replace("-", "_")
            known = keys_of("pins")
            if name not in known:
                meant = WORDS.get(name)
                raise InputError(
                    f"{option}: there is no {key!r} to pin",
                    expected=f"one of {', '.join(known)}",
                    fix=f"did you mean {meant!r}?" if meant else nearest(name, known),
                )
            if name in pins and pins[name].text != f"{name}={value}":
                raise InputError(f"{option} pins {key} twice: {pins[name].text} and {pair.strip()}")
            pins[name] = declare(f"pins.{name}", value, origin=option, where=f"{option} {key}")
    return tuple(pins.values())


def check_work(constraints: Constraints) -> None:
    """Raise if a deadline or a budget has no length of training, or if two lengths are given."""
    own = {one.field: one for one in constraints.declared}
    if "samples" in own and "tokens" in own:
        raise InputError(
            f"{own['samples']} and {own['tokens']} both say how much a training does",
            fix="leave one of them out",
        )
    limit = own.get("deadline_seconds") or own.get("budget_usd")
    if limit is not None and not {"samples", "tokens"} & own.keys():
        raise InputError(
            f"{limit.text} is given, but the length of the training is not",
            where=limit.origin,
            fix="--tokens 10B, or --samples 1M, says how much it does",
        )


def check_tokens(constraints: Constraints, *, tokens_per_row: int) -> None:
    """Raise for a number of tokens if the model's rows are no sequences."""
    if constraints.tokens is not None and tokens_per_row == 1:
        own = next(one for one in constraints.declared if one.field == "tokens")
        raise InputError(
            f"{own.text}, but the model's rows are no sequences of tokens",
            where=own.origin,
            fix="--samples says how many rows it trains on",
        )
