"""`autopar emit`: writes the training script of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.codegen.script.render import FILE_NAME, refuse_overwriting
from autopar.console import print_note, results
from autopar.options import CACHE
from autopar.planner.errors import ExitCode, InputError
from autopar.planner.files import refuse_replacing, write_whole
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.traced import model_spec, with_model
from autopar.planning import script_of, traced_plan

PLAN = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json or its folder")]
MODEL = Annotated[
    str | None,
    typer.Option("--model", metavar="FILE", help="The plan's model file, if it has moved."),
]


def emit_script(
    plan: PLAN,
    model: MODEL = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: train.py beside the plan."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; check whether the script is up to date.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a script that was changed by hand.")
    ] = False,
    cache: CACHE = True,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone", help="Write a folder that needs only torch and the model file."
        ),
    ] = False,
) -> None:
    """Write the training script of a plan.

    With --standalone, -o names a folder; by default it is `standalone` beside the plan. The model
    file is not copied there: it may stay where it is, or lie beside the script.

    Example: autopar emit out/plan.json -o train.py
    """
    beside = plan if plan.is_dir() else plan.parent
    found = with_model(read_plan(plan), beside, model)
    if standalone:
        if check:
            raise InputError("--check and --standalone do not go together")
        folder = output if output is not None else beside / "standalone"
        from autopar.codegen.emit import write_standalone

        whole = traced_plan(found, beside, uses_cache=cache)
        path = write_standalone(whole, folder, beside, force=force)
        needed = ", ".join(_needed(model_path(model_spec(found, beside))))
        results().print(
            f"Written: {path}\n"
            f"To train on another machine, copy {folder} there, and {needed} into it.",
            soft_wrap=True,
        )
        return
    path = output if output is not None else beside / FILE_NAME
    refuse_replacing(path, beside / PLAN_NAME)
    if check:
        _check(path, script_of(found, path, folder=beside, uses_cache=cache).text)
        return
    if not force:
        refuse_overwriting(path)
    made = script_of(found, path, folder=beside, uses_cache=cache)
    write_whole(path, made.text, what="the script")
    for note in made.notes:
        print_note(note)
    results().print(f"Written: {path}", soft_wrap=True)


def _needed(model: Path) -> list[str]:
    """Return the files and folders to copy for a model file and its imports."""
    folder = import_name(model).folder
    return sorted({file.relative_to(folder).parts[0] for file in sources(model)})


def _check(path: Path, expected: str) -> None:
    """Exit with 1 if the file is not the plan's script."""
    if not path.is_file():
        raise InputError(f"there is no script {path}", fix="leave --check out to write it")
    wanted = expected.encode()
    if path.stat().st_size != len(wanted) or path.read_bytes() != wanted:
        results().print(f"{path} is not the script of this plan", soft_wrap=True)
        raise typer.Exit(int(ExitCode.NEGATIVE))
    results().print(f"{path} is the script of this plan", soft_wrap=True)
