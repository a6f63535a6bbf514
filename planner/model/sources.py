"""Finds the files of a model: the model file, and what it imports from its own folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

from autopar.planner.model.import_name import INIT, import_name, imported_names

_LIBRARIES = {"autopar", "torch", *sys.stdlib_module_names}


def sources(path: Path) -> list[Path]:
    """Return a file and, through imports, what lies in the folder that they are looked up in."""
    folder, found, waiting = import_name(path).folder, {path}, [path]
    while waiting:
        importing = waiting.pop()
        for name in imported_names(importing):
            module = _place(name, importing, folder)
            for file in (module.with_name(f"{module.name}.py"), module / INIT):
                if file.is_file() and file not in found and folder in file.parents:
                    found.add(file)
                    waiting.append(file)
    return sorted(found)


def _place(name: str, importing: Path, folder: Path) -> Path:
    """Return where a module would be; one dot is the folder of the file, each other goes up."""
    absolute = name.lstrip(".")
    level = len(name) - len(absolute)
    above = importing.parents[level - 1] if level else folder
    return above.joinpath(*absolute.split(".")) if absolute else above


def loaded_sources(path: Path, classes: Iterable[type] = ()) -> list[ModuleType]:
    """Return the modules of Python that the code of a model is in, none of a library.

    Those are its files, and what defines the classes of the model or is named in these files: a
    package of the user's that is installed in place.
    """
    files = set(map(str, sources(path)))
    loaded = list(sys.modules.values())
    home = [one for one in loaded if getattr(one, "__file__", None) in files]
    named = [value for file in home for value in vars(file).values()]
    defined = (one for one in (*classes, *named) if isinstance(one, type | FunctionType))
    names = {one.__module__ for one in defined}
    names |= {one.__name__ for one in named if isinstance(one, ModuleType)}
    elsewhere = (sys.modules[name] for name in sorted(names) if name in sys.modules)
    return [one for one in dict.fromkeys((*home, *elsewhere)) if not _is_library(one)]


def _is_library(module: ModuleType) -> bool:
    file, package = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    is_installed = file is None or "site-packages" in file or "dist-packages" in file
    return is_installed or package in _LIBRARIES
