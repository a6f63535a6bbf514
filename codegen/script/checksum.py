"""Tells a script that people have changed from one that is as it was written."""

from __future__ import annotations

import hashlib
import re

from autopar.codegen.python_text import Source, remark

_LINE = re.compile(r"^# Written by autopar [^\n]*: ([0-9a-f]{16})\.$", re.MULTILINE)


def with_checksum(script: str, version: str) -> Source:
    """Return a script with a line, behind its docstring, by which a change is noticed."""
    head, mark, body = script.partition('\n"""\n')
    digest = _digest(script)
    by = f"Written by autopar {version}, which never overwrites changes by hand: {digest}."
    line = remark(by)
    return Source(f"{head}{mark}{line}\n{body}")


def is_unchanged(script: str) -> bool:
    """Whether a text is a script of ours, to the last character."""
    found = _LINE.search(script)
    if found is None:
        return False
    without = script[: found.start()] + script[found.end() + 1 :]
    return _digest(without) == found[1]


def _digest(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()[:16]
