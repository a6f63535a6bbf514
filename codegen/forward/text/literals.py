"""Turns plain values of the graph into Python literals."""

from __future__ import annotations

import math

from autopar.codegen.forward.text.expressions import Expression, Form, Level, joined, text
from autopar.codegen.forward.text.identifiers import string

Plain = str | bool | int | float | complex | None


def literal(value: Plain) -> Form:
    """Return a plain value as source."""
    if isinstance(value, str):
        return text(string(value))
    if isinstance(value, float) and not math.isfinite(value):
        sign = "-" if value < 0 else ""
        return text(f'float("{sign}{"nan" if math.isnan(value) else "inf"}")')
    if isinstance(value, complex):
        is_finite = math.isfinite(value.real) and math.isfinite(value.imag)
        return text(repr(value) if is_finite else f'complex("{value!r}")')
    negative = isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0
    return text(repr(value), Level.SIGN if negative else Level.CALL)


def literals(values: tuple[Plain, ...]) -> Form:
    """Return plain values as a tuple."""
    items: tuple[Expression, ...] = tuple(map(literal, values))
    return joined(items)


def nested(value: object) -> Form:
    """Return nested tuples of plain values as nested lists, for torch.tensor."""
    if isinstance(value, tuple):
        inner = ", ".join(_text(nested(item)) for item in value)
        return text(f"[{inner}]")
    assert value is None or isinstance(value, (str, bool, int, float, complex))
    return literal(value)


def _text(form: Form) -> str:
    return "".join(part for part in form.parts if isinstance(part, str))
