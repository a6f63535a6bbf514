"""Writes the files of a job into a folder, with all that its training needs there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

from autopar.codegen.emit import write_standalone
from autopar.codegen.launch.views import Content, LaunchFile
from autopar.codegen.script.render import FILE_NAME
from autopar.planner.errors import InputError
from autopar.planner.files import check_writable, read_given, write_whole
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name, imported_names
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.plan import Plan

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
    plan: Plan, files: tuple[LaunchFile, ...], folder: Path, *, model: Path, force: bool
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
