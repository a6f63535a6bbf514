"""Reads the script that is verified: its settings, and which lines its plan would not write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from autopar.codegen.emit import FILE_NAME, script_text
from autopar.codegen.subject import subject_of
from autopar.planner.errors import InputError
from autopar.planner.given import read_given
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.chosen import Usual

_DIGEST = "# Written by autopar "
_USUAL = {one.name: one.name.upper() for one in fields(Usual)}
_NEEDED = ("main", "train_step")  # what is run, and what is watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of a script that its plan would write otherwise."""

    line: int  # the number of the first one
    found: tuple[str, ...]
    emitted: tuple[str, ...]
    start: int  # where those that were emitted stand in the script of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenScript:
    """A script as it lies there, and what of its settings one process follows too."""

    path: Path
    edits: tuple[Edit, ...]
    seed: int
    clip_norm: float | None
    usual: Usual


def read_script_of(plan: Plan, path: Path, folder: Path) -> GivenScript:
    """Read the script at a place; a relative path of the model file is seen from a folder."""
    place, subject = path.resolve(), subject_of(plan, folder)
    texts = [script_text(plan, subject, one) for one in (place, place.with_name(FILE_NAME))]
    if not path.is_file():
        raise InputError(
            "there is no script to verify",
            where=str(path),
            expected=f"{FILE_NAME} beside the plan, or the one that --script names",
            fix=f"write it with `autopar emit {folder}`, or say where it is: --script PATH",
        )
    # A copy under another name says in its docstring how to run what it is a copy of.
    return min((read_script(place, text) for text in texts), key=lambda one: len(one.edits))


def read_script(path: Path, emitted: str) -> GivenScript:
    """Read a script; `emitted` is what its plan would write in its place."""
    text = read_given(path, what="the script")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(
            f"the script is no Python: {error.msg}", where=f"{path}, line {error.lineno}"
        ) from error
    names = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    if missing := [name for name in _NEEDED if name not in names]:
        raise InputError(
            f"the script has no function {' and no '.join(missing)}",
            where=str(path),
            expected="main, which is run, and train_step, whose steps are watched",
            fix="bring them back under these names",
        )
    settings = dict(_settings(tree))
    return GivenScript(
        path=path,
        edits=edits_of(text, emitted),
        seed=settings.get("SEED", 0),
        clip_norm=settings.get("CLIP_NORM", 1.0),
        usual=Usual(**{key: settings[name] for key, name in _USUAL.items() if name in settings}),
    )


def edits_of(text: str, emitted: str) -> tuple[Edit, ...]:
    """Return where a script is not what its plan would write, but for the line that says so."""
    numbers, found = zip(*_lines(text), strict=True) if text.strip() else ((), ())
    planned = [line for _, line in _lines(emitted)]
    matcher = SequenceMatcher(None, planned, found, autojunk=False)
    return tuple(
        Edit(
            line=numbers[j1] if j1 < len(numbers) else len(text.splitlines()) + 1,
            found=tuple(found[j1:j2]),
            emitted=tuple(planned[i1:i2]),
            start=i1,
        )
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    )


def carried_over(script: GivenScript, emitted: str, other: str) -> str:
    """Return the script of another plan with the lines that people changed in this one's."""
    lines = [line for _, line in _lines(emitted)]
    others = [line for _, line in _lines(other)]
    places = {
        own + offset: there + offset
        for own, there, size in SequenceMatcher(None, lines, others, False).get_matching_blocks()
        for offset in range(size)
    }
    for edit in reversed(script.edits):
        last = edit.start + len(edit.emitted)
        whole = range(edit.start, last) or range(edit.start - 1, edit.start)
        there = [places.get(line, -1) for line in whole]
        if there != list(range(there[0], there[0] + len(there))) or there[0] < 0:
            raise InputError(
                "a line was changed where the script of the smaller model reads otherwise",
                where=f"{script.path}, line {edit.line}",
                fix="verify the script with the whole model, without --arg",
            )
        first = there[0] + (not edit.emitted)
        others[first : first + len(edit.emitted)] = edit.found
    return "\n".join(others) + "\n"


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, but for the one that has the digest of the others."""
    return [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.startswith(_DIGEST)
    ]


def _settings(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain values that a script sets at its top."""
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            try:
                yield one.targets[0].id, ast.literal_eval(one.value)
            except ValueError:
                continue
