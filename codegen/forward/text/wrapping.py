"""Breaks long lines of source as ruff format does: inside the last bracket, then item by item."""

from __future__ import annotations

import re

WIDTH = 100
_OPEN, _CLOSE = "([{", ")]}"
_TRAILER = re.compile(r"(\.\w+)*$")  # the name of a method after a bracket
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'')


def _bare(line: str) -> str:
    """Return a line of the same length without what its strings say."""
    return _STRING.sub(lambda found: "_" * len(found[0]), line)


def _partition(line: str, mark: str) -> tuple[str, str, str]:
    """Part a line where a mark is code."""
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


def wrapped_del(names: list[str], *, indent: int) -> list[str]:
    """Return a statement that deletes some names, over several lines where it is long."""
    margin, line = " " * indent, f"del {', '.join(names)}"
    if indent + len(line) <= WIDTH:
        return [margin + line]
    return [f"{margin}del (", *(f"{margin}    {name}," for name in names), f"{margin})"]


def wrapped_definition(name: str, arguments: list[str], returns: str, *, indent: int) -> list[str]:
    """Return the first line of a function, over several lines where it is long."""
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
    """Put brackets around the right side of an assignment; what has no operator stays too long."""
    margin = " " * indent
    if " " not in line:
        return [margin + line]
    word = "return " if line.startswith("return ") else ""
    target, equals, _ = _partition(line, " = ")
    head = word or (f"{target}{equals}" if equals else "")
    value = line.removeprefix(head)
    return [f"{margin}{head}(", f"{margin}    {value}", f"{margin})"]


def _choice(line: str, indent: int) -> list[str]:
    """Put brackets around `a if b else c`, and each of the three on a line if they must be."""
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
    """Return where the bracket opens that closes last, if nothing but a colon follows it."""
    bare = _bare(line).rstrip(":")
    return _opening(bare) if bare and bare[-1] in _CLOSE else None


def _before_trailers(line: str, start: int, indent: int) -> int:
    """Return an earlier bracket where what stands before the last one, `f(…)[0]`, is too long."""
    bare = _bare(line)
    while indent + start >= WIDTH:
        before = _TRAILER.sub("", bare[:start])
        earlier = _opening(before) if before and before[-1] in _CLOSE else None
        if earlier is None:
            break
        start = earlier
    return start


def _opening(bare: str) -> int | None:
    """Return where the bracket opens that closes at the end of a text."""
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
