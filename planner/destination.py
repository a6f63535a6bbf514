"""Refuses places where a result cannot be written, before the work is done that leads to it."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.planner.errors import InputError

_FIX = "choose another place with -o"


def check_writable(path: Path) -> None:
    """Refuse a file that is a folder, or that lies below a file or in a folder closed to us."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a file", fix=_FIX)
    folder = next(one for one in path.absolute().parents if os.path.lexists(one))
    if not folder.is_dir():
        raise InputError(
            f"{_as_given(folder, path)} is a file, not a folder", where=str(path), fix=_FIX
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        found = f"nothing can be written to {_as_given(folder, path)}"
        raise InputError(found, where=str(path), fix=_FIX)


def refuse_replacing(path: Path, *sources: Path) -> None:
    """Refuse to write a result over what it is made from, whatever else may be overwritten."""
    if path.exists() and any(one.exists() and path.samefile(one) for one in sources):
        raise InputError(
            "the script would replace the file that it is made from", where=str(path), fix=_FIX
        )


def _as_given(folder: Path, path: Path) -> Path:
    """Return a folder around a path in the words of the path, relative where that is."""
    above = len(path.absolute().parts) - len(folder.parts)
    return path.parents[above - 1] if above <= len(path.parents) else folder
