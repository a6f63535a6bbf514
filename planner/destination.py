"""Writes results whole, and refuses places where that cannot be before the work is done."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from autopar.planner.errors import InputError
from autopar.planner.given import kind_of

_FIX = "choose another place with -o"
_OF_A_FILE = re.compile(r"\.[A-Za-z]\w*")
_MANIFEST, _MARK = "checkpoint.json", re.compile(r'"written_by": *"autopar"')  # of a checkpoint
PLAN_FOLDER = "a folder, which gets plan.json and train.py"
_HEAD_BYTES = 4096
_DEVICES = Path("/dev")  # /dev/stdout is a place that people name


def check_writable(path: Path) -> None:
    """Refuse a file that is a folder or a pipe, or lies in a checkpoint or where none can be."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a file", fix=_FIX)
    refuse_in_checkpoint(path)
    kind = kind_of(path)
    if kind and _DEVICES not in path.absolute().parents:
        raise InputError(f"{path} is {kind}, not a file", fix=_FIX)
    folder = next(one for one in path.absolute().parents if os.path.lexists(one))
    if not folder.is_dir():
        raise InputError(
            f"{_as_given(folder, path)} is a file, not a folder", where=str(path), fix=_FIX
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        found = f"nothing can be written to {_as_given(folder, path)}"
        raise InputError(found, where=str(path), fix=_FIX)


def refuse_in_checkpoint(path: Path) -> None:
    """Refuse a place in a checkpoint, which stays as it was written."""
    for folder in (path.resolve(), *path.resolve().parents):
        manifest = folder / _MANIFEST
        if manifest.is_file() and os.access(manifest, os.R_OK) and _MARK.search(_head(manifest)):
            raise InputError(
                f"{path} is in the checkpoint {folder}, which stays as it is", fix=_FIX
            )


def refuse_named_as_file(
    folder: Path, *, option: str = "-o", expected: str = "the name of a folder"
) -> None:
    """Refuse a folder to come whose name has the ending of a file: meant was a file."""
    if _OF_A_FILE.fullmatch(folder.suffix) and not folder.exists():
        raise InputError(
            f"{option} {folder} names a file",
            expected=expected,
            fix=f"{option} {folder.with_suffix('')}, or make a folder of that name first",
        )


def refuse_replacing(path: Path, *sources: Path) -> None:
    """Refuse to write a result over what it is made from, whatever else may be overwritten."""
    if path.exists() and any(one.exists() and path.samefile(one) for one in sources):
        raise InputError(
            "the script would replace the file that it is made from", where=str(path), fix=_FIX
        )


def refuse_others(path: Path, *, beginning: str) -> None:
    """Refuse to write over a file that does not begin as those of autopar do."""
    if path.is_file() and not _head(path).startswith(beginning):
        found = "a file that autopar did not write is in the way"
        raise InputError(found, where=str(path), fix=_FIX)


def write_whole(path: Path, text: str, *, what: str, mode: int = 0o666) -> None:
    """Write a file, and the folder that it lies in: all of it, or nothing of it.

    `mode` is who may read it, but for those whom the umask shuts out.
    """
    refuse_in_checkpoint(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text, mode)  # what a link leads to, not the link
    except OSError as error:
        found = f"{what} cannot be written: {error.strerror}"
        raise InputError(found, where=str(path), fix=_FIX) from None


def _replace(path: Path, text: str, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(mode & ~_umask())  # mkstemp's own is for secrets
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", errors="replace")


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask


def _as_given(folder: Path, path: Path) -> Path:
    """Return a folder around a path in the words of the path, relative where that is."""
    above = len(path.absolute().parts) - len(folder.parts)
    return path.parents[above - 1] if above <= len(path.parents) else folder
