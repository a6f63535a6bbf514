"""Turns plain values into Python text, laid out as the formatter would."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autopar.codegen.forward.identifiers import comment, is_identifier, string

WIDTH = 100


class Source(str):
    """Text that is Python already: made of literals and identifiers by this package alone."""

    __slots__ = ()


def literal(value: object) -> Source:
    """Return a plain value as Python, in ASCII."""
    if isinstance(value, str):
        return Source(string(value))
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return Source(f"({inner},)" if len(value) == 1 else f"({inner})")
    if isinstance(value, list):
        return Source(f"[{', '.join(map(literal, value))}]")
    if isinstance(value, dict):
        pairs = (f"{literal(key)}: {literal(item)}" for key, item in value.items())
        return Source(f"{{{', '.join(pairs)}}}")
    if value is None or type(value) in (bool, int, float):
        text = repr(value)
        return Source(f'float("{text}")' if text in ("inf", "-inf", "nan") else text)
    raise TypeError(f"{type(value).__name__} is no plain value")


def identifier(value: object) -> Source:
    """Return a text that is an identifier as it is; refuse any other."""
    if not isinstance(value, str) or not is_identifier(value):
        raise ValueError(f"{value!r} is no identifier")
    return Source(value)


def remark(value: str) -> Source:
    """Return a text as a comment of one line."""
    return Source(f"# {comment(value)}")


def prose(value: str) -> str:
    """Return a text that can stand in a docstring: one line without quotes and backslashes."""
    one_line = re.sub(r"[^\x20-\x7e×·…–≥≤]+", " ", value)
    return one_line.replace("\\", "/").replace('"', "'").rstrip()


def call(function: str, arguments: Sequence[str], *, before: int = 0, indent: int = 0) -> Source:
    """Return a call behind `before` characters: on one line if it fits, else an argument a line."""
    text = f"{function}({', '.join(arguments)})"
    if before + len(text) <= WIDTH:
        return Source(text)
    return Source(_on_lines(f"{function}(", arguments, ")", indent))


def tuple_of(items: Sequence[str], *, before: int, indent: int = 0) -> Source:
    """Return a tuple behind `before` characters of its line."""
    text = f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if before + len(text) <= WIDTH:
        return Source(text)
    return Source(_on_lines("(", items, ")", indent))


def assigned(name: str, opening: str, rows: Iterable[tuple[str, str]], closing: str) -> Source:
    """Return `name = opening … closing` with a row on each line, each with a remark or "".

    A remark that does not fit behind its row stands above it.
    """
    rows = list(rows)
    if len(rows) == 1 and opening == "(" and not rows[0][1]:
        return Source(f"{name} = {tuple_of([rows[0][0]], before=len(name) + 3)}")
    lines = [f"{name} = {opening}"]
    for row, said in rows:
        text = f"    {row},"
        if not said:
            lines.append(text)
        elif "\n" not in text and len(f"{text}  {remark(said)}") <= WIDTH:
            lines.append(f"{text}  {remark(said)}")
        else:
            lines += [f"    {remark(said[: WIDTH - 6])}", text]
    return Source("\n".join([*lines, closing]))


def _on_lines(opening: str, items: Sequence[str], closing: str, indent: int) -> str:
    margin = " " * indent
    inner = [f"{margin}    {item}," for item in items]
    return "\n".join([opening, *inner, f"{margin}{closing}"])
