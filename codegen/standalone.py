"""Writes a folder that trains without autopar: the script, the runtime, the plan."""

from __future__ import annotations

import shutil
from pathlib import Path

from autopar import runtime
from autopar.codegen.emit import FILE_NAME, emit, refuse_overwriting
from autopar.planner.destination import (
    check_writable,
    refuse_named_as_file,
    refuse_others,
    write_whole,
)
from autopar.planner.errors import InputError
from autopar.planner.plan.files.document import FILE_NAME as PLAN_FILE
from autopar.planner.plan.files.document import refuse_foreign, write_plan
from autopar.planner.plan.plan import Plan


def write_standalone(plan: Plan, folder: Path, model_folder: Path, *, force: bool) -> Path:
    """Write the script of a plan with what it imports into a folder; return the script's place."""
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
    """Refuse a folder `autopar` that another run of ours did not leave here."""
    refuse_others(package / "__init__.py", beginning=_PACKAGE)
    if package.is_dir() and any(package.iterdir()) and not (package / "__init__.py").exists():
        raise InputError(
            "a folder that autopar did not write is in the way",
            where=str(package),
            fix="choose another place with -o",
        )
