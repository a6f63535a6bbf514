"""Imports a model file anew, as Python would that ran it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from autopar.planner.errors import InputError
from autopar.planner.model.guard import guarded, no_process_group, uncompiled
from autopar.planner.model.import_name import ImportName, import_name


def import_file(path: Path) -> ModuleType:
    """Import the file anew, its folder or its package's first on sys.path, as Python has it."""
    known = import_name(path)
    _check_name(path, known)
    spec = importlib.util.spec_from_file_location(known.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(known.folder) not in sys.path:
        sys.path.insert(0, str(known.folder))
    _forget_packages_elsewhere(known)
    shadowed = sys.modules.get(known.name)
    try:
        with guarded(f"importing {path.name}", path), no_process_group(path), uncompiled():
            if package := known.name.rpartition(".")[0]:
                importlib.import_module(package)
            sys.modules[known.name] = module  # where dataclasses and pickling look it up
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(known.name, None)
        if shadowed is not None:
            sys.modules[known.name] = shadowed
        raise
    return module


def _forget_packages_elsewhere(known: ImportName) -> None:
    """Drop a package of the same name that another folder has, which was imported before."""
    top, dot, _ = known.name.partition(".")
    there = getattr(sys.modules.get(top), "__file__", None)
    if dot and there and Path(there).parent != known.home:
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]


def _check_name(path: Path, known: ImportName) -> None:
    """Refuse a file that would be imported in the place of Python's or an installed module."""
    top, dot, _ = known.name.partition(".")
    there = getattr(sys.modules.get(top), "__file__", None) or ""
    if top in sys.stdlib_module_names or "site-packages" in there:
        found = known.home if dot else path
        raise InputError(
            f"{found.name} would hide the module {top}, which others import",
            where=str(found),
            fix=f"rename it, such as my_{found.name}",
        )
