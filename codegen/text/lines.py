"""Lines of Python as text: line breaks, and values that are computed only once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.text.expressions import Expression, LocalTensor
from autopar.codegen.text.values import WIDTH
from autopar.planner.graph.graph import Graph


def from_line(module: str, names: Sequence[str]) -> str:
    """Return an import statement, on one line if it fits."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


Pattern = LocalTensor | None | tuple["Pattern", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a body: an expression and its results, which have no names yet.

    Lines with `is_ordered` (random numbers, writes) keep their order. If the line is one call of a
    module, `module` is the module's path and `arguments` are those of the call. `function` is the
    name of a plain function that it calls.
    """

    results: Pattern
    expression: Expression
    is_ordered: bool = False
    has_gradient: bool = True
    is_random: bool = False
    reason: str = ""  # why a value is converted; becomes a comment
    hint: str = ""  # the name of the op, function or module
    names: tuple[tuple[str, ...], ...] = ()  # the author's names of each result
    module: str | None = None
    function: str = ""
    only_evaluates: bool = False  # runs in evaluations only
    arguments: tuple[tuple[str, Expression], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The lines of a printed call, its tensor arguments by name, and its result."""

    axis: str  # the body's name of the tensor axis
    arguments: Mapping[LocalTensor, str]
    containers: frozenset[str]  # the names of arguments that contain several tensors
    lines: tuple[Line, ...]
    result: Expression | None


def values_in(pattern: Pattern) -> Iterator[LocalTensor]:
    """Yield the values in a pattern."""
    if isinstance(pattern, LocalTensor):
        yield pattern
    elif isinstance(pattern, tuple):
        for item in pattern:
            yield from values_in(item)


class ComputedValues:
    """The values without a gradient that a body has computed, so that each is computed once.

    Hugging Face's masks count the positions once for the queries and once for the keys, and again
    for each kind of layer. Values that are written to are not shared.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[Expression, LocalTensor] = {}

    def earlier(self, expression: Expression, made: LocalTensor) -> LocalTensor | None:
        """Return an earlier value with this expression; if there is none, record `made`."""
        learns = self.graph.tensors[made.tensor].requires_grad
        if learns or self.graph.index.is_written_later(made.tensor):
            return None
        found = self.made.setdefault(expression, made)
        return found if found != made and found.layout == made.layout else None


_OPEN, _CLOSE = "([{", ")]}"
_TRAILER = re.compile(r"(\.\w+)*$")  # the name of a method after a bracket
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'')


def _bare(line: str) -> str:
    """Return a line of the same length with its strings blanked."""
    return _STRING.sub(lambda found: "_" * len(found[0]), line)


def _partition(line: str, mark: str) -> tuple[str, str, str]:
    """Split a line at a mark outside of strings."""
    at = _bare(line).find(mark)
    return (line[:at], mark, line[at + len(mark) :]) if at >= 0 else (line, "", "")


def wrapped(line: str, *, indent: int) -> list[str]:
    """Return a statement as lines that fit, each with its indentation."""
    margin = " " * indent
    if indent + len(line) <= WIDTH:
        return [margin + line]
    start = _last_bracket(line)
    if start is None:
        return _choice(line, indent) if " if " in _bare(line) else _bracketed(line, indent)
    start = _before_trailers(line, start, indent)
    end = _closing(line, start)
    head, body, tail = line[: start + 1], line[start + 1 : end], line[end:]
    return [margin + head, *_body(body, indent + 4), margin + tail]


def wrapped_definition(name: str, arguments: list[str], returns: str, *, indent: int) -> list[str]:
    """Return the first line of a function, over several lines if it is long."""
    margin = " " * indent
    tail = f") -> {returns}:"
    whole = ", ".join(arguments)
    if indent + len(f"def {name}({whole}{tail}") <= WIDTH:
        return [f"{margin}def {name}({whole}{tail}"]
    if indent + 4 + len(whole) <= WIDTH:
        return [f"{margin}def {name}(", f"{margin}    {whole}", margin + tail]
    items = [f"{margin}    {argument}," for argument in arguments]
    return [f"{margin}def {name}(", *items, margin + tail]


def _body(body: str, indent: int) -> list[str]:
    if indent + len(body) <= WIDTH:
        return [" " * indent + body]
    lines: list[str] = []
    for item in _items(body):
        inner = wrapped(item, indent=indent)
        inner[-1] += ","
        lines += inner
    return lines


def _bracketed(line: str, indent: int) -> list[str]:
    """Put brackets around the right side of an assignment, if it has an operator."""
    margin = " " * indent
    if " " not in line:
        return [margin + line]
    word = "return " if line.startswith("return ") else ""
    target, equals, _ = _partition(line, " = ")
    head = word or (f"{target}{equals}" if equals else "")
    value = line.removeprefix(head)
    return [f"{margin}{head}(", f"{margin}    {value}", f"{margin})"]


def _choice(line: str, indent: int) -> list[str]:
    """Put brackets around `a if b else c`, with the three on separate lines if necessary."""
    margin = " " * indent
    value = line
    for mark in ("return ", " = ", "="):
        head, found, rest = _partition(line, mark)
        if found and "(" not in head and " if " in _bare(rest):
            value = rest
            break
    head = line.removesuffix(value)
    first, _, rest = _partition(value, " if ")
    condition, _, other = _partition(rest, " else ")
    fits = indent + 4 + len(value) <= WIDTH
    inner = [value] if fits else [first, f"if {condition}", f"else {other}"]
    return [f"{margin}{head}(", *(f"{margin}    {part}" for part in inner), f"{margin})"]


def _last_bracket(line: str) -> int | None:
    """Return where the bracket that ends a line was opened; None if the line ends otherwise."""
    bare = _bare(line).rstrip(":")
    return _opening(bare) if bare and bare[-1] in _CLOSE else None


def _before_trailers(line: str, start: int, indent: int) -> int:
    """Return `start`, or the position of an earlier bracket if the text before `start` is too long.

    In `f(…)[0]` with a long call, the line is then broken after `f(`.
    """
    bare = _bare(line)
    while indent + start >= WIDTH:
        before = _TRAILER.sub("", bare[:start])
        earlier = _opening(before) if before and before[-1] in _CLOSE else None
        if earlier is None:
            break
        start = earlier
    return start


def _opening(bare: str) -> int | None:
    """Return the position of the bracket that the last character of a text closes."""
    depth = 0
    for position in range(len(bare) - 1, -1, -1):
        depth += (bare[position] in _CLOSE) - (bare[position] in _OPEN)
        if depth == 0:
            return position
    return None


def _closing(line: str, start: int) -> int:
    depth, bare = 0, _bare(line)
    for position in range(start, len(line)):
        depth += (bare[position] in _OPEN) - (bare[position] in _CLOSE)
        if depth == 0:
            return position
    raise ValueError(line)


def _items(body: str) -> list[str]:
    items, depth, begin = [], 0, 0
    for position, letter in enumerate(_bare(body)):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth == 0:
            items.append(body[begin:position].strip())
            begin = position + 1
    last = body[begin:].strip()
    return [*items, last] if last else items
