"""Tells by which name Python imports a model file, and from which folder on its path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INIT = "__init__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportName:
    """A module as an import statement has it: `myproj.model`, found in `folder`."""

    name: str
    folder: Path

    @property
    def home(self) -> Path:
        """The folder that holds the file and its neighbours: that of the package, if it has one."""
        top, dot, _ = self.name.partition(".")
        return self.folder / top if dot else self.folder


def import_name(path: Path) -> ImportName:
    """Return the name of a file: of its package, if it imports from that, else its own alone."""
    parts, folder = [path.stem], path.parent
    while (folder / INIT).is_file() and folder != folder.parent:
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) > 1 and any(_is_of(parts[0], name) for name in imported_names(path)):
        return ImportName(name=".".join(parts), folder=folder)
    return ImportName(name=path.stem, folder=path.parent)


def imported_names(path: Path) -> Iterator[str]:
    """Yield all that a file imports, dots in front of what is relative; nothing of a broken one."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            end = "" if module.endswith(".") else "."
            yield from (f"{module}{end}{alias.name}" for alias in node.names)


def _is_of(package: str, name: str) -> bool:
    return name.startswith((".", f"{package}.")) or name == package
