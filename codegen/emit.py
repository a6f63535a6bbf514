"""Writes a plan's script, alone or in a folder that runs where autopar is not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from autopar import runtime
from autopar.codegen.forward.reading.forward_source import call_tree
from autopar.codegen.forward.reading.modules import named_functions
from autopar.codegen.script.render import (
    FILE_NAME,
    TEMPLATE,
    check_script,
    environment,
    refuse_overwriting,
    render,
    with_checksum,
    write_text,
)
from autopar.codegen.script.view import script_view
from autopar.codegen.subject import BuiltModel as BuiltModel
from autopar.codegen.subject import PlannedSubject, absent_notes, subject_of
from autopar.planner.errors import InputError
from autopar.planner.files import (
    check_writable,
    refuse_named_as_file,
    refuse_others,
    refuse_replacing,
    write_whole,
)
from autopar.planner.findings.rows import meeting_rows
from autopar.planner.model.guard import import_name
from autopar.planner.plan.files.cache import NO_CACHE, Cache
from autopar.planner.plan.files.document import FILE_NAME as PLAN_FILE
from autopar.planner.plan.files.document import refuse_foreign, write_plan
from autopar.planner.plan.plan import Plan


def write_standalone(plan: Plan, folder: Path, model_folder: Path, *, force: bool) -> Path:
    """Write a plan's script, plan.json and the runtime into a folder; return the script's path."""
    path, package = folder / FILE_NAME, folder / "autopar"
    refuse_named_as_file(folder)
    for place in (
        folder / PLAN_FILE,
        package / "__init__.py",
        package / "runtime" / "ranks" / "mesh.py",
    ):
        check_writable(place)
    refuse_foreign(folder / PLAN_FILE)
    _refuse_package_of_others(package)
    if not force:
        refuse_overwriting(path)
    write_whole(path, emit(plan, destination=path, folder=model_folder), what="the script")
    write_plan(plan, folder / PLAN_FILE)
    shutil.rmtree(package / "runtime", ignore_errors=True)
    shutil.copytree(
        Path(runtime.__file__).parent,
        package / "runtime",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    write_whole(package / "__init__.py", _PACKAGE, what="the runtime")
    return path


_PACKAGE = '"""The part of autopar that a training script needs."""\n'


def _refuse_package_of_others(package: Path) -> None:
    """Raise if a folder `autopar` exists that a previous run did not write."""
    refuse_others(package / "__init__.py", beginning=_PACKAGE)
    if package.is_dir() and any(package.iterdir()) and not (package / "__init__.py").exists():
        raise InputError(
            "a folder that autopar did not write is in the way",
            where=str(package),
            fix="choose another place with -o",
        )


def emit(plan: Plan, *, destination: Path, folder: Path | None = None) -> str:
    """Return the script of a plan for the path `destination`.

    A relative path of the model file is looked up in the working directory, then in `folder` (by
    default that of `destination`) and its parents.
    """
    return emit_with_notes(plan, destination=destination, folder=folder)[0]


def emit_with_notes(
    plan: Plan,
    *,
    destination: Path,
    folder: Path | None = None,
    cache: Cache = NO_CACHE,
    built: BuiltModel | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the script of a plan, and notes for the user to read before running it."""
    place = destination.resolve()
    subject = subject_of(plan, place.parent if folder is None else folder, cache, built)
    refuse_replacing(place, subject.file.path)
    return script_text(plan, subject, place), tuple(absent_notes(subject))


def prepare(built: BuiltModel) -> None:
    """Find what scripts of a model need whatever its plan is; what is found is remembered."""
    assert built.graph is not None
    call_tree(built.graph)
    named_functions(built.graph, built.modules)
    meeting_rows(built.graph)
    import_name(built.file.path)
    environment().get_template(TEMPLATE)


def script_text(plan: Plan, subject: PlannedSubject, place: Path) -> str:
    """Return the script of a plan for the path `place`; `subject` is the plan's traced model."""
    script = with_checksum(render(script_view(plan, subject, place)), plan)
    check_script(script)
    return script


def write_script(plan: Plan, folder: Path, *, force: bool = False) -> Path:
    """Write a plan's script into a folder as train.py, and return its path."""
    return write_text(emit(plan, destination=folder / FILE_NAME), folder, force=force)
