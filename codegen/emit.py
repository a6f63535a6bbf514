"""Turns a plan into the text of its training script."""

from __future__ import annotations

from pathlib import Path

from autopar.codegen.script.check import check_script
from autopar.codegen.script.checksum import is_unchanged, with_checksum
from autopar.codegen.script.evaluation import absent_notes
from autopar.codegen.script.render import render
from autopar.codegen.script.view import script_view
from autopar.codegen.subject import Subject, subject_of
from autopar.planner.destination import check_writable, refuse_replacing, write_whole
from autopar.planner.errors import InputError
from autopar.planner.given import read_given
from autopar.planner.plan.plan import Plan

FILE_NAME = "train.py"


def emit(plan: Plan, *, destination: Path, folder: Path | None = None) -> str:
    """Return the script of a plan as it will stand at `destination`.

    A relative path of the model file is seen from here, or else from `folder`, where the plan lies.
    """
    return emit_with_notes(plan, destination=destination, folder=folder)[0]


def emit_with_notes(
    plan: Plan, *, destination: Path, folder: Path | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the script of a plan, and what a person should know of it before it runs."""
    place = destination.resolve()
    subject = subject_of(plan, place.parent if folder is None else folder)
    refuse_replacing(place, subject.file.path)
    return script_text(plan, subject, place), tuple(absent_notes(subject))


def script_text(plan: Plan, subject: Subject, place: Path) -> str:
    """Return the script of a plan whose subject is known, as it will stand at `place`."""
    script = with_checksum(render(script_view(plan, subject, place)), plan)
    check_script(script)
    return script


def refuse_overwriting(
    path: Path, *, fix: str = "choose another name with -o, or overwrite it with --force"
) -> None:
    """Refuse to write over what is not a script of ours as it was written."""
    check_writable(path)
    if not path.exists():
        return
    try:
        is_ours = is_unchanged(read_given(path, what="the script"))
    except InputError:
        is_ours = False
    if not is_ours:
        raise InputError(
            "a file that autopar did not write, or that was changed since, is in the way",
            where=str(path),
            fix=fix,
        )


def write_script(
    plan: Plan, folder: Path, *, force: bool = False, model_folder: Path | None = None
) -> Path:
    """Write train.py of a plan into a folder, and return where it is."""
    text = emit(plan, destination=folder / FILE_NAME, folder=model_folder or folder)
    return write_text(text, folder, force=force)


def write_text(text: str, folder: Path, *, force: bool = False) -> Path:
    """Write the text of a script into a folder as train.py, and return where it is."""
    path = folder / FILE_NAME
    if not force:
        refuse_overwriting(path)
    write_whole(path, text, what="the script")
    return path
