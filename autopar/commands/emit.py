"""`autopar emit`: writes the training script of a plan, and jobs for schedulers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated

import typer

from autopar.codegen.emit import write_standalone
from autopar.codegen.launch.settings import read_settings
from autopar.codegen.launch.tool_facts import tool_facts
from autopar.codegen.launch.tools import TOOLS, tool_files
from autopar.codegen.launch.views import (
    TARGETS,
    VOLUME,
    WITHOUT_STORAGE,
    Content,
    LaunchFile,
    job_name,
    job_of,
    launch_files,
)
from autopar.codegen.script.render import FILE_NAME, refuse_overwriting
from autopar.console import print_note, results
from autopar.options import CACHE, MOVED_MODEL, PLAN
from autopar.planner.errors import ExitCode, InputError
from autopar.planner.files import check_writable, read_given, refuse_replacing, write_whole
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name, imported_names
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import Plan, StoredPlan
from autopar.planner.plan.traced import model_spec, with_model
from autopar.planning import script_of, traced_plan
from autopar.runs.run_folder import (
    CHECKPOINTS,
    Start,
    refuse_wrong_options,
    script_arguments,
    value_given,
)
from autopar.runs.run_record import METRICS


def emit_script(
    plan: PLAN,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="options of the script in a job, with --for"),
    ] = None,
    model: MOVED_MODEL = None,
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
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="|".join((*TARGETS, *TOOLS)),
            help="Write a folder with a job for this scheduler and all that it needs, or with the "
            "plan as a configuration of another training tool.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the job: partition, account, image, queue, volume, time …",
        ),
    ] = None,
    shows: Annotated[
        bool, typer.Option("--print", help="Print the files of --for, and write nothing.")
    ] = False,
) -> None:
    """Write the training script of a plan, a job for a scheduler, or settings of another tool.

    With --standalone or --for, -o names a folder; by default it is `standalone`, or the name after
    --for, beside the plan. --standalone does not copy the model file: it may stay where it is, or
    lie beside the script. With --for and a scheduler, the folder has the model file, too, and files
    that start the training; options of the script come after --, as in
    autopar emit out --for slurm --set partition=gpu -- --steps 1000

    Example: autopar emit out/plan.json -o train.py
    """
    plan_folder = plan if plan.is_dir() else plan.parent
    found = with_model(read_plan(plan), plan_folder, model)
    if target is None and (settings or shows or arguments):
        raise InputError("--set, --print and options after -- need --for", fix="--for slurm")
    if target is not None:
        is_tool, folder = target in TOOLS, output or plan_folder / target
        if is_tool and (settings or arguments):
            raise InputError(f"--set and options after -- do not go with --for {target}")
        if check or standalone:
            raise InputError("--for does not go with --check or --standalone")
        if is_tool:
            whole = traced_plan(found, plan_folder, uses_cache=cache)
            files, notes = tool_files(target, tool_facts(whole))
        else:
            if arguments:
                made = script_of(found, folder / FILE_NAME, folder=plan_folder, uses_cache=cache)
                refuse_wrong_options(made.text, arguments)
            files, notes = _job(target, found, plan_folder, settings or (), arguments or ())
        for note in notes:
            print_note(note)
        if shows:
            _show(files)
            return
        if is_tool:
            write_tool_files(files, folder, force=force)
        else:
            whole = traced_plan(found, plan_folder, uses_cache=cache)
            write_job(whole, files, folder, _model(found, plan_folder), force=force)
        names = ", ".join(one.name for one in files)
        results().print(f"Written: {folder}, with {names}", soft_wrap=True)
        return
    if standalone:
        if check:
            raise InputError("--check and --standalone do not go together")
        folder = output or plan_folder / "standalone"
        whole = traced_plan(found, plan_folder, uses_cache=cache)
        path = write_standalone(whole, folder, plan_folder, force=force)
        needed = ", ".join(_needed(_model(found, plan_folder)))
        results().print(
            f"Written: {path}\n"
            f"To train on another machine, copy {folder} there, and {needed} into it.",
            soft_wrap=True,
        )
        return
    path = output or plan_folder / FILE_NAME
    refuse_replacing(path, plan_folder / PLAN_NAME)
    if check:
        _check(path, script_of(found, path, folder=plan_folder, uses_cache=cache).text)
        return
    if not force:
        refuse_overwriting(path)
    made = script_of(found, path, folder=plan_folder, uses_cache=cache)
    write_whole(path, made.text, what="the script")
    for note in made.notes:
        print_note(note)
    results().print(f"Written: {path}", soft_wrap=True)


def _model(plan: StoredPlan, plan_folder: Path) -> Path:
    """Return the model file of a plan."""
    return model_path(model_spec(plan, plan_folder))


def _job(
    target: str, plan: StoredPlan, plan_folder: Path, given: Sequence[str], arguments: Sequence[str]
) -> tuple[tuple[LaunchFile, ...], tuple[str, ...]]:
    """Return the files of a job for a scheduler, and notes to read before it is submitted."""
    if target not in TARGETS:
        raise InputError(f"--for {target}", expected=", ".join((*TARGETS, *TOOLS)))
    settings = read_settings(target, tuple(given))
    name = job_name(plan, settings)
    folder = Path(VOLUME) / name if settings.volume else Path()
    start = Start(checkpoints=folder / CHECKPOINTS)
    own = script_arguments({}, folder, start, tuple(arguments))
    job = job_of(
        plan,
        target,
        settings,
        content=content_of(_model(plan, plan_folder)),
        arguments=own,
        metrics=value_given("--metrics", own) or METRICS,
    )
    keeps = settings.volume or "://" in (value_given("--checkpoint", own) or "")
    return launch_files(job), () if keeps or target not in WITHOUT_STORAGE else (_FORGOTTEN,)


_FORGOTTEN = (
    "checkpoints stay in the containers, and are lost with them: --set volume=NAME keeps them, and "
    "so does -- --checkpoint s3://…"
)


def _show(files: Sequence[LaunchFile]) -> None:
    """Print files; of several, each after a line with its name."""
    for one in files:
        if len(files) > 1:
            print(f"# ---- {one.name}")
        print(one.text, end="")


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


_RUNTIME = "autopar"  # the folder beside a standalone script that holds the runtime
_REQUIREMENTS = ("torch", "safetensors")  # packages that the runtime imports


def content_of(model: Path) -> Content:
    """Return the files and folders of a job's folder, and the packages that they need."""
    own = sorted({path.parts[0] for path in _relative(model)})
    folders = [name for name in own if not name.endswith(".py")]
    files = [name for name in own if name.endswith(".py")]
    return Content(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        packages=tuple(_packages(model)),
        folders=(_RUNTIME, *folders),
        files=(*files, FILE_NAME, PLAN_NAME),
    )


def _relative(model: Path) -> list[Path]:
    """Return the model file, the files beside it that it imports, and their `__init__.py` files.

    The paths are relative to the folder from which the model file is imported.
    """
    folder = import_name(model).folder
    found = {file.relative_to(folder) for file in sources(model)}
    above = {parent / "__init__.py" for one in found for parent in one.parents}
    return sorted(found | {one for one in above if one.parts[1:] and (folder / one).is_file()})


def _packages(model: Path) -> Iterator[str]:
    """Yield the requirements of the runtime and of the model's files, with their versions here."""
    names = {name.partition(".")[0] for file in sources(model) for name in imported_names(file)}
    known = packages_distributions()
    own = {path.parts[0].removesuffix(".py") for path in _relative(model)} | {_RUNTIME}
    needed = {known[name][0] for name in names - own - sys.stdlib_module_names if name in known}
    for name in sorted(needed | set(_REQUIREMENTS)):
        yield f"{name}=={version(name).partition('+')[0]}"  # without the build: 2.13.0+cpu


def write_job(
    plan: Plan, files: Sequence[LaunchFile], folder: Path, model: Path, *, force: bool
) -> None:
    """Write a job's files, the standalone script and the model file into a folder."""
    home = import_name(model).folder
    texts = {folder / one.name: one.text for one in files}
    for one in _relative(model):
        if (home / one).resolve() != (folder / one).resolve():
            texts[folder / one] = read_given(home / one, what="the model file")
    for path, text in texts.items():
        _refuse_other(path, text, force=force)
    write_standalone(plan, folder, model.parent, force=force)
    for path, text in texts.items():
        write_whole(path, text, what="the job")


def write_tool_files(files: Sequence[LaunchFile], folder: Path, *, force: bool) -> None:
    """Write the files of another training tool into a folder."""
    for one in files:
        _refuse_other(folder / one.name, one.text, force=force)
    for one in files:
        write_whole(folder / one.name, one.text, what="the configuration")


def _refuse_other(path: Path, text: str, *, force: bool) -> None:
    """Raise if a file with another text is in the way."""
    check_writable(path)
    if force or not path.exists() or path.read_text(encoding="utf-8", errors="replace") == text:
        return
    raise InputError(
        "a file with other contents is in the way",
        where=str(path),
        fix="choose another folder with -o, or overwrite it with --force",
    )
