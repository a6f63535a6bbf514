"""Turns names of modules, parameters and axes into Python text that cannot be anything else."""

from __future__ import annotations

import re
from keyword import iskeyword, issoftkeyword


def is_identifier(text: str) -> bool:
    """Whether a text is a plain ASCII name that Python does not use itself."""
    return text.isascii() and text.isidentifier() and not iskeyword(text)


def identifier(text: str) -> str:
    """Return a name made of the letters, digits and underscores of any text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "x"
    if name[0].isdigit():
        name = f"x{name}"
    return f"{name}_" if iskeyword(name) or issoftkeyword(name) else name


def attribute(name: str) -> str:
    """Return how an attribute is reached, behind the object: `.name`."""
    if not is_identifier(name):
        raise ValueError(f"{name!r} is no attribute")
    return f".{name}"


def string(text: str) -> str:
    """Return a text as an ASCII literal in double quotes where it has none itself."""
    literal = ascii(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in literal else literal


def comment(text: str) -> str:
    """Return a text that stays a comment: one line of ASCII without control characters."""
    return re.sub(r"[^\x20-\x7e]+", " ", text).strip()
