"""Turns `--arg key=value` into values of the types that a model file's functions declare."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from autopar.planner.errors import InputError

_PASSED = frozenset({"batch_size", "outputs", "batch", "params", "optimizer"})  # by autopar itself


def parse_arguments(
    arguments: Sequence[str], functions: Mapping[str, Callable[..., Any]], path: Path
) -> dict[str, Any]:
    """Parse `key=value` by the annotation of the parameter that takes it."""
    known = _known_parameters(functions)
    values: dict[str, Any] = {}
    for text in arguments:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise InputError(f"--arg {text} is not of the form key=value", fix="--arg size=tiny")
        if key in values:
            raise InputError(f"--arg {key} is given twice")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            fix = f"did you mean {near[0]}?" if near else ""
            takes = ", ".join(sorted(known)) or "no arguments"
            raise InputError(
                f"--arg {key}: no function of {path.name} takes it",
                expected=f"known: {takes}",
                fix=fix,
            )
        values[key] = _parse_value(key, raw, known[key])
    return values


def _known_parameters(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Return the keyword parameters that --arg may set, with their annotations as text."""
    known: dict[str, str] = {}
    for function in functions.values():
        for name, parameter in inspect.signature(function).parameters.items():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and name not in _PASSED:
                known.setdefault(name, inspect.formatannotation(parameter.annotation).strip("'\""))
    return known


def _parse_value(key: str, raw: str, annotation: str) -> Any:
    kinds = annotation.removeprefix("Optional[").removesuffix("]").split(" | ")
    if raw.lower() == "none" and ("None" in kinds or "Optional[" in annotation):
        return None
    if kinds[0] in ("str", "Path"):
        return raw
    words = {"true": True, "false": False, "none": None}
    try:
        value = words[raw.lower()] if raw.lower() in words else ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        value = raw
    # By exact type: True is an int for Python, but not for a person.
    expected = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(kinds[0])
    if expected and type(value) not in expected:
        raise InputError(f"--arg {key}={raw} is not of type {annotation}")
    return value
