"""Turns declared constraints into rows for a JSON file, and such rows back into constraints."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from pydantic import JsonValue, TypeAdapter, ValidationError

from autopar.planner.plan.declared.constraints import RULES, Constraints, Declared


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDocument:
    """One constraint as it lies in a file; the field tells the type of the value."""

    place: str
    field: str
    value: JsonValue
    text: str
    origin: str


def declared_document(one: Declared) -> DeclaredDocument:
    """Return one constraint as it lies in a file."""
    return DeclaredDocument(
        place=one.place,
        field=one.field,
        value=_adapter(one.field).dump_python(one.value, mode="json"),
        text=one.text,
        origin=one.origin,
    )


def declared_of(document: DeclaredDocument) -> Declared:
    """Return the constraint that a row holds; raise ValueError where there is none such."""
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
    """Return what reads the values of a field of Constraints, or one of its rules."""
    hint = get_type_hints(Constraints)[field]
    return TypeAdapter(get_args(hint)[0] if field in RULES else hint)
