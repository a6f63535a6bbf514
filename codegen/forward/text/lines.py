"""The steps of a printed body, before it is decided which values get a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.forward.text.expressions import Expression, Form, Held, Slot

Pattern = Held | None | tuple["Pattern", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One step of a body, before it is decided which values get a name.

    `is_ordered` steps (random numbers, writes) keep their order. `module` is the path of the
    module where the line is one call of a module, and `arguments` are what it is called with;
    `function` is the name of a plain function that the line calls.
    """

    results: Pattern
    expression: Expression
    is_ordered: bool = False
    has_gradient: bool = True
    is_random: bool = False
    reason: str = ""
    hint: str = ""
    names: tuple[str, ...] = ()  # what the model's author calls the results, "" where nothing
    module: str | None = None
    function: str = ""
    only_evaluates: bool = False  # runs in evaluations alone
    arguments: tuple[tuple[str, Expression], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The lines of a printed call, its tensor arguments by name, and what it returns."""

    arguments: Mapping[Held, str]
    containers: frozenset[str]  # the names of arguments that hold several tensors
    lines: tuple[Line, ...]
    result: Expression | None


def held_in(pattern: Pattern) -> Iterator[Held]:
    """Yield the values in a pattern."""
    if isinstance(pattern, Held):
        yield pattern
    elif isinstance(pattern, tuple):
        for item in pattern:
            yield from held_in(item)


def tuple_of(items: Sequence[Expression]) -> Form:
    """Return values with commas between them and no brackets, as a return statement has them."""
    parts: list[str | Slot] = []
    for number, item in enumerate(items):
        parts += [", " if number else "", Slot(item)]
    return Form(tuple(parts))
