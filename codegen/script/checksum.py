"""Tells a script that people have changed from one that is as written, and by which plan."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, replace

from autopar.codegen.python_text import Source, remark
from autopar.planner.plan.plan import Plan

_LINE = re.compile(
    r"^# Written by autopar (\S+), [^\n]*: ([0-9a-f]{16})(?:, plan ([0-9a-f]{16}))?\.$",
    re.MULTILINE,
)


def with_checksum(script: str, plan: Plan) -> Source:
    """Return a script with a line, behind its docstring, by which a change is noticed."""
    head, mark, body = script.partition('\n"""\n')
    own = f"{_digest(script)}, plan {plan_digest(plan)}"
    line = remark(f"Written by autopar {plan.autopar}, which keeps changes by hand: {own}.")
    return Source(f"{head}{mark}{line}\n{body}")


def is_unchanged(script: str) -> bool:
    """Whether a text is a script of ours, to the last character."""
    found = _LINE.search(script)
    if found is None:
        return False
    without = script[: found.start()] + script[found.end() + 1 :]
    return _digest(without) == found[2]


def is_of_another_plan(script: str, plan: Plan) -> bool:
    """Whether a script, changed by hand or not, was written by another plan than this one.

    Where an autopar of another version wrote it, nobody knows.
    """
    found = _LINE.search(script)
    if found is None or found[3] is None or found[1] != plan.autopar:
        return False
    return found[3] != plan_digest(plan)


def plan_digest(plan: Plan) -> str:
    """Return what stands for all of a plan that decides how its script trains."""
    decided = (
        plan.model.source_hash,
        plan.model.arguments,
        replace(plan.arrangement, order=0),  # which no file holds
        plan.stages,
        plan.layouts,
        plan.parameters,
        plan.crossing,
    )
    return _digest(json.dumps(decided, sort_keys=True, default=asdict))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
