"""Finds the files of a model: the model file, and what it imports from its own folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from autopar.planner.model.import_name import INIT, import_name, imported_names


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


def loaded_sources(path: Path) -> list[ModuleType]:
    """Return the modules of Python that these files are loaded as, none of autopar's own."""
    files = set(map(str, sources(path)))
    loaded = (one for name, one in list(sys.modules.items()) if not name.startswith("autopar."))
    return [one for one in loaded if getattr(one, "__file__", None) in files]
