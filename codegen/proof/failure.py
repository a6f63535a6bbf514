"""Turns what torchrun and the ranks of a script printed into why the script failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from autopar.planner.errors import AutoparError, ExitCode

LAST_LINES = 15  # of what a failed script printed
_KILLED = re.compile(r"exitcode\s*: -9\b")  # of what torchrun says failed first
_REFUSED = re.compile(r"^error: (.*)\n  fix: (.*)$", re.MULTILINE)  # as runtime.refusal has it
_HUNG = re.compile(r"Timeout \(\d+:\d\d:\d\d")  # as faulthandler begins
_TRACEBACK = "Traceback (most recent call last)"


class ScriptFailedError(AutoparError):
    """A script that ended with an error."""

    exit_code = ExitCode.TRAINING_FAILED


def failure_of(printed: str, ranks: int, script: Path | None = None) -> ScriptFailedError:
    """Return what failed, by what torchrun and the ranks have printed."""
    if _KILLED.search(printed.partition("Root Cause")[2]):
        return ScriptFailedError(
            f"one of {ranks} processes was killed, as happens when memory runs out",
            fix="verify a smaller model of the same file (autopar verify PLAN --arg layers=…), or "
            "end what else takes memory",
        )
    if hung := _HUNG.search(printed):
        inside = re.compile(rf'File "{re.escape(str(script))}", line (\d+) in (\w+)')
        at = inside.search(printed, hung.end())
        return ScriptFailedError(
            f"the script stands still on {ranks} processes"
            + (f": one of them waits in {at[2]}, line {at[1]}" if at else ""),
            fix="look for a collective that only some of the ranks call, or for a stage that gives "
            "other tensors than the next one takes",
        )
    if refusal := _REFUSED.search(printed):
        return ScriptFailedError(f"the script refuses to run: {refusal[1]}", fix=refusal[2])
    told = "\n".join(first_traceback(printed.strip().splitlines())[-LAST_LINES:])
    return ScriptFailedError(f"the script failed on {ranks} processes:\n{told}")


def first_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the first traceback of the rank that printed one first, or all lines.

    Lines of other ranks may stand between its own; what it raised later is set off by an empty one.
    """
    at = next((i for i, line in enumerate(lines) if _TRACEBACK in line), None)
    if at is None:
        return lines
    rank = lines[at].partition(_TRACEBACK)[0]
    if not rank:  # before the ranks have met nothing tells their lines apart
        frames = list(takewhile(lambda line: line.startswith(" "), lines[at + 1 :]))
        return lines[at : at + len(frames) + 2]
    own = (line for line in lines[at:] if line.startswith(rank.strip()))
    return list(takewhile(lambda line: line.strip() != rank.strip(), own))
