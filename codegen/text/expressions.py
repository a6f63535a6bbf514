"""Expressions of Python as text."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from keyword import iskeyword, issoftkeyword
from typing import Any

from autopar.planner.graph.layouts import Layout
from autopar.planner.graph.ops import Listed, Value


def is_identifier(text: str) -> bool:
    """Whether a text is an ASCII identifier that is not a keyword."""
    return text.isascii() and text.isidentifier() and not iskeyword(text)


def identifier(text: str) -> str:
    """Return a lower-case identifier made of the letters, digits and underscores of a text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "x"
    if name[0].isdigit():
        name = f"x{name}"
    return f"{name}_" if iskeyword(name) or issoftkeyword(name) else name


def string(text: str) -> str:
    """Return a text as an ASCII literal, in double quotes if it contains none."""
    literal = ascii(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in literal else literal


def comment(text: str) -> str:
    """Return a text that is safe as a comment: one line of ASCII without control characters."""
    return re.sub(r"[^\x20-\x7e]+", " ", text).strip()


Plain = str | bool | int | float | complex | None


def literal(value: Plain) -> SourceForm:
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
    return text(repr(value), Binding.SIGN if negative else Binding.CALL)


def nested(value: object) -> SourceForm:
    """Return nested tuples of plain values as nested lists, for torch.tensor."""
    if isinstance(value, tuple):
        return listed(tuple(map(nested, value)))
    assert value is None or isinstance(value, (str, bool, int, float, complex))
    return literal(value)


class Binding(IntEnum):
    """How tightly an expression binds, loosest first."""

    TUPLE = 0
    CHOICE = 1  # a if b else c
    COMPARISON = 2
    OR = 3
    XOR = 4
    AND = 5
    SHIFT = 6
    SUM = 7
    PRODUCT = 8
    SIGN = 9
    POWER = 10
    CALL = 11  # calls, attributes, names, literals


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the graph in one of its layouts: a value of printed code."""

    tensor: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of a value that code reads: `shape[0]`, `dtype`, `device`."""

    value: LocalTensor
    what: str


@dataclass(frozen=True, slots=True)
class SourceForm:
    """Source text with expressions in it."""

    parts: tuple[str | Slot, ...]
    level: Binding = Binding.CALL


Expression = LocalTensor | Fact | SourceForm


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for an expression, and how tightly it must bind to need no brackets."""

    expression: Expression
    level: Binding = Binding.CHOICE


Names = Callable[[LocalTensor | Fact], tuple[str, Binding]]


def text(source: str, level: Binding = Binding.CALL) -> SourceForm:
    """Return source text without expressions in it."""
    return SourceForm((source,), level)


def separated(items: Iterable[tuple[str, Expression]]) -> Iterator[str | Slot]:
    """Yield expressions with commas between them, each after its own text, such as `dim=`."""
    for number, (before, item) in enumerate(items):
        yield f", {before}" if number else before
        yield Slot(item)


def call(
    function: str | SourceForm,
    *arguments: Expression,
    keywords: tuple[tuple[str, Expression], ...] = (),
) -> SourceForm:
    """Return the call of a function."""
    before = function.parts if isinstance(function, SourceForm) else (function,)
    named = ((f"{name}=", value) for name, value in keywords)
    given = (*(("", value) for value in arguments), *named)
    return SourceForm((*before, "(", *separated(given), ")"), Binding.CALL)


def method(
    owner: Expression,
    name: str,
    *arguments: Expression,
    keywords: tuple[tuple[str, Expression], ...] = (),
) -> SourceForm:
    """Return the call of a method."""
    function = SourceForm((Slot(owner, Binding.CALL), f".{name}"))
    return call(function, *arguments, keywords=keywords)


def attribute(owner: Expression, name: str) -> SourceForm:
    """Return an attribute of an expression."""
    return SourceForm((Slot(owner, Binding.CALL), f".{name}"))


def indexed(owner: Expression, index: SourceForm) -> SourceForm:
    """Return an expression with an index in square brackets."""
    return SourceForm((Slot(owner, Binding.CALL), "[", Slot(index, Binding.TUPLE), "]"))


def bare(items: Iterable[Expression]) -> SourceForm:
    """Return values with commas and no brackets, as in a return statement."""
    return SourceForm(tuple(separated(("", item) for item in items)))


def joined(items: tuple[Expression, ...]) -> SourceForm:
    """Return a tuple in round brackets."""
    return SourceForm(("(", *bare(items).parts, ",)" if len(items) == 1 else ")"))


def listed(items: tuple[Expression, ...]) -> SourceForm:
    """Return a list."""
    return SourceForm(("[", *bare(items).parts, "]"))


def mapped(items: Iterable[tuple[Expression, Expression]]) -> SourceForm:
    """Return a dict."""
    parts: list[str | Slot] = ["{"]
    for number, (key, item) in enumerate(items):
        parts += [", " if number else "", Slot(key), ": ", Slot(item)]
    return SourceForm((*parts, "}"))


def sequence(value: tuple[Value, ...], items: tuple[Expression, ...]) -> SourceForm:
    """Return values as a list or a tuple, as in the model."""
    return listed(items) if isinstance(value, Listed) else joined(items)


def binary(left: Expression, sign: str, right: Expression, level: Binding) -> SourceForm:
    """Return a binary operation that associates to the left."""
    tighter = Binding(min(level + 1, Binding.CALL))
    left_level = tighter if level is Binding.COMPARISON else level
    return SourceForm((Slot(left, left_level), f" {sign} ", Slot(right, tighter)), level)


def power(base: Expression, exponent: Expression) -> SourceForm:
    """Return a power; Ruff writes simple operands without spaces (see `rendered`)."""
    return SourceForm((Slot(base, Binding.CALL), "**", Slot(exponent, Binding.SIGN)), Binding.POWER)


_ARITHMETIC: Mapping[type[ast.operator], tuple[str, Binding, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", Binding.SUM, operator.add),
    ast.Sub: ("-", Binding.SUM, operator.sub),
    ast.Mult: ("*", Binding.PRODUCT, operator.mul),
    ast.Div: ("/", Binding.PRODUCT, operator.truediv),
    ast.Pow: ("**", Binding.POWER, operator.pow),
}
_ROOTS = ("math.sqrt", "sqrt")
Computed = tuple[int | float, Expression]  # a number, and the expression that computes it


def computed(tree: ast.expr, known: Callable[[ast.expr], Computed | None]) -> Computed | None:
    """Return the value and the expression of arithmetic in a source; None for any other code.

    `known` does the same for the operands: attributes and sizes.
    """
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value, literal(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value, literal(-value)
        case ast.Call(func=called, args=[root]) if ast.unparse(called) in _ROOTS:
            inner = computed(root, known)
            if inner is None or inner[0] < 0:
                return None
            return math.sqrt(inner[0]), call("math.sqrt", inner[1])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            one, other = computed(left, known), computed(right, known)
            if one is None or other is None:
                return None
            sign, level, function = _ARITHMETIC[type(op)]
            try:
                value = function(float(one[0]), float(other[0]))
            except (ArithmeticError, ValueError):
                return None
            is_power = level is Binding.POWER
            form = power(one[1], other[1]) if is_power else binary(one[1], sign, other[1], level)
            return value, form
    return known(tree)


def pieces(expression: Expression) -> Iterator[LocalTensor | Fact]:
    """Yield the values and facts in an expression, in the order of evaluation."""
    if not isinstance(expression, SourceForm):
        yield expression
        return
    for part in expression.parts:
        if isinstance(part, Slot):
            yield from pieces(part.expression)


def replaced(
    expression: Expression, known: Callable[[LocalTensor], Expression | None]
) -> Expression:
    """Return an expression with known values replaced by their expressions."""
    if isinstance(expression, LocalTensor):
        return known(expression) or expression
    if isinstance(expression, Fact):
        return expression
    parts = tuple(
        Slot(replaced(part.expression, known), part.level) if isinstance(part, Slot) else part
        for part in expression.parts
    )
    return _as_one_index(SourceForm(parts, expression.level))


def at_dim(dim: int, index: Expression) -> SourceForm:
    """Return the index of one dim, with colons or dots for the others: `:, 0`, or `..., 0`."""
    if dim == -1:
        return SourceForm(("..., ", Slot(index)), Binding.TUPLE)
    if dim < 0:
        return SourceForm(("..., ", Slot(index), ", :" * (-dim - 1)), Binding.TUPLE)
    return SourceForm((":, " * dim, Slot(index)), Binding.TUPLE)


def _as_one_index(form: SourceForm) -> SourceForm:
    """Return `x[:, :n][:, :, :m]` as `x[:, :n, :m]`, and any other form as it is."""
    match form.parts:
        case (
            Slot(
                expression=SourceForm(
                    parts=(owner, "[", Slot(expression=SourceForm(parts=first)), "]")
                )
            ),
            "[",
            Slot(expression=SourceForm(parts=(str(colons), Slot() as last))),
            "]",
        ):
            count = sum(1 if isinstance(part, Slot) else part.count(":") for part in first)
            more = len(colons) // len(":, ") - count
            if all(map(_keeps_dims, first)) and more >= 0 and not colons.strip(":, "):
                parts = (*first, ", ", ":, " * more, last)
                index = Slot(SourceForm(parts, Binding.TUPLE), Binding.TUPLE)
                return SourceForm((owner, "[", index, "]"), form.level)
    return form


def _keeps_dims(part: str | Slot) -> bool:
    """Whether a part of an index has one item for each dim of the result: slices and None."""
    if isinstance(part, str):
        return not part.strip(":, ")
    inner = part.expression
    return isinstance(inner, SourceForm) and (":" in inner.parts or inner.parts == ("None",))


def with_numbers(form: SourceForm, known: Mapping[SourceForm, SourceForm]) -> SourceForm:
    """Return a form with the literals in `known` replaced by their expressions."""
    parts = tuple(
        Slot(
            known[part.expression]
            if part.expression in known
            else with_numbers(part.expression, known),
            part.level,
        )
        if isinstance(part, Slot) and isinstance(part.expression, SourceForm)
        else part
        for part in form.parts
    )
    return SourceForm(parts, form.level)


def rendered(expression: Expression, names: Names) -> tuple[str, Binding]:
    """Return the text of an expression and how tightly it binds."""
    if not isinstance(expression, SourceForm):
        return names(expression)
    rendered_parts: list[str] = []
    for part in expression.parts:
        if isinstance(part, str):
            rendered_parts.append(part)
            continue
        inner, level = rendered(part.expression, names)
        rendered_parts.append(inner if level >= part.level else f"({inner})")
    if expression.level is Binding.POWER and len(rendered_parts) == 3:
        base, _, exponent = rendered_parts
        tight = _is_simple(base) and _is_simple(exponent)
        return (f"{base}**{exponent}" if tight else f"{base} ** {exponent}"), Binding.POWER
    return "".join(rendered_parts), expression.level


def _is_simple(operand: str) -> bool:
    """Whether an operand is a name, an attribute or a number; Ruff then omits spaces at `**`."""
    bare = operand.removeprefix("-")
    return all(piece.replace("_", "a").isalnum() for piece in bare.split("."))
