"""Writes results whole, and refuses places where that cannot be before the work is done."""

from __future__ import annotations

import os
import tempfile
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


def refuse_named_as_file(folder: Path) -> None:
    """Refuse a folder to come that is called as its files are: meant was a file."""
    if folder.suffix in (".json", ".py") and not folder.exists():
        raise InputError(
            f"-o {folder} names a file",
            expected="a folder, which gets plan.json and train.py",
            fix=f"-o {folder.with_suffix('')}",
        )


def refuse_replacing(path: Path, *sources: Path) -> None:
    """Refuse to write a result over what it is made from, whatever else may be overwritten."""
    if path.exists() and any(one.exists() and path.samefile(one) for one in sources):
        raise InputError(
            "the script would replace the file that it is made from", where=str(path), fix=_FIX
        )


def refuse_others(path: Path, *, beginning: str) -> None:
    """Refuse to write over a file that does not begin as those of autopar do."""
    if path.is_file() and not path.read_text(encoding="utf-8", errors="replace").startswith(
        beginning
    ):
        found = "a file that autopar did not write is in the way"
        raise InputError(found, where=str(path), fix=_FIX)


def write_whole(path: Path, text: str, *, what: str) -> None:
    """Write a file, and the folder that it lies in: all of it, or nothing of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)  # what a link leads to, not the link
    except OSError as error:
        found = f"{what} cannot be written: {error.strerror}"
        raise InputError(found, where=str(path), fix=_FIX) from None


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o666 & ~_umask())  # mkstemp's own is for secrets
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask


def _as_given(folder: Path, path: Path) -> Path:
    """Return a folder around a path in the words of the path, relative where that is."""
    above = len(path.absolute().parts) - len(folder.parts)
    return path.parents[above - 1] if above <= len(path.parents) else folder
