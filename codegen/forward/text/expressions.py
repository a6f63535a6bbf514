"""The expressions of printed code as small trees, and their text in the style of ruff format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from autopar.planner.layouts import Layout
from autopar.planner.ops import Listed, Value


class Level(IntEnum):
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
class Held:
    """A tensor of the graph in one of its layouts: a value that code can have at hand."""

    tensor: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Fact:
    """What code reads off a value without using its numbers: `shape[0]`, `dtype`, `device`."""

    held: Held
    what: str


@dataclass(frozen=True, slots=True)
class Form:
    """Source text with expressions in it."""

    parts: tuple[str | Slot, ...]
    level: Level = Level.CALL


Expression = Held | Fact | Form


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a form, and how tightly what stands there must bind to need no brackets."""

    expression: Expression
    level: Level = Level.CHOICE


Names = Callable[[Held | Fact], tuple[str, Level]]


def text(source: str, level: Level = Level.CALL) -> Form:
    """Return source text that has no expressions in it."""
    return Form((source,), level)


def call(
    function: str | Form,
    *arguments: Expression,
    keywords: tuple[tuple[str, Expression], ...] = (),
) -> Form:
    """Return the call of a function."""
    parts: list[str | Slot] = list(function.parts if isinstance(function, Form) else (function,))
    parts.append("(")
    for number, (name, argument) in enumerate([*(("", a) for a in arguments), *keywords]):
        separator = ", " if number else ""
        parts += [f"{separator}{name}=" if name else separator, Slot(argument)]
    return Form((*parts, ")"), Level.CALL)


def method(
    owner: Expression,
    name: str,
    *arguments: Expression,
    keywords: tuple[tuple[str, Expression], ...] = (),
) -> Form:
    """Return the call of a method."""
    function = Form((Slot(owner, Level.CALL), f".{name}"))
    return call(function, *arguments, keywords=keywords)


def attribute(owner: Expression, name: str) -> Form:
    """Return an attribute of an expression."""
    return Form((Slot(owner, Level.CALL), f".{name}"))


def indexed(owner: Expression, index: Form) -> Form:
    """Return an expression with an index in square brackets."""
    return Form((Slot(owner, Level.CALL), "[", Slot(index, Level.TUPLE), "]"))


def joined(items: tuple[Expression, ...]) -> Form:
    """Return a tuple in round brackets."""
    parts: list[str | Slot] = ["("]
    for number, item in enumerate(items):
        parts += [", " if number else "", Slot(item)]
    return Form((*parts, ",)" if len(items) == 1 else ")"))


def listed(items: tuple[Expression, ...]) -> Form:
    """Return a list."""
    parts: list[str | Slot] = ["["]
    for number, item in enumerate(items):
        parts += [", " if number else "", Slot(item)]
    return Form((*parts, "]"))


def mapped(items: Iterable[tuple[Expression, Expression]]) -> Form:
    """Return a dict."""
    parts: list[str | Slot] = ["{"]
    for number, (key, item) in enumerate(items):
        parts += [", " if number else "", Slot(key), ": ", Slot(item)]
    return Form((*parts, "}"))


def sequence(value: tuple[Value, ...], items: tuple[Expression, ...]) -> Form:
    """Return values as the model has them, in a list or in a tuple."""
    return listed(items) if isinstance(value, Listed) else joined(items)


def binary(left: Expression, operator: str, right: Expression, level: Level) -> Form:
    """Return an operation of two operands that associates to the left."""
    tighter = Level(min(level + 1, Level.CALL))
    left_level = tighter if level is Level.COMPARISON else level
    return Form((Slot(left, left_level), f" {operator} ", Slot(right, tighter)), level)


def power(base: Expression, exponent: Expression) -> Form:
    """Return a power; the formatter writes simple operands without spaces (see `rendered`)."""
    return Form((Slot(base, Level.CALL), "**", Slot(exponent, Level.SIGN)), Level.POWER)


def pieces(expression: Expression) -> Iterator[Held | Fact]:
    """Yield the values and facts in an expression, in the order of evaluation."""
    if not isinstance(expression, Form):
        yield expression
        return
    for part in expression.parts:
        if isinstance(part, Slot):
            yield from pieces(part.expression)


def replaced(expression: Expression, known: Callable[[Held], Expression | None]) -> Expression:
    """Return an expression with values replaced by the expressions known for them."""
    if isinstance(expression, Held):
        return known(expression) or expression
    if isinstance(expression, Fact):
        return expression
    parts = tuple(
        Slot(replaced(part.expression, known), part.level) if isinstance(part, Slot) else part
        for part in expression.parts
    )
    return Form(parts, expression.level)


def rendered(expression: Expression, names: Names) -> tuple[str, Level]:
    """Return the text of an expression and how tightly it binds."""
    if not isinstance(expression, Form):
        return names(expression)
    rendered_parts: list[str] = []
    for part in expression.parts:
        if isinstance(part, str):
            rendered_parts.append(part)
            continue
        inner, level = rendered(part.expression, names)
        rendered_parts.append(inner if level >= part.level else f"({inner})")
    if expression.level is Level.POWER and len(rendered_parts) == 3:
        base, _, exponent = rendered_parts
        tight = _is_simple(base) and _is_simple(exponent)
        return (f"{base}**{exponent}" if tight else f"{base} ** {exponent}"), Level.POWER
    return "".join(rendered_parts), expression.level


def _is_simple(operand: str) -> bool:
    """Whether the formatter hugs the operator: names, attributes, numbers, also negative ones."""
    bare = operand.removeprefix("-")
    return all(piece.replace("_", "a").isalnum() for piece in bare.split("."))
