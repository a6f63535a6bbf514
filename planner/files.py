"""Reads and checks users' files, and writes files completely or not at all."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError

from autopar.planner.errors import InputError

# The largest clusters have about 100,000 devices; many more are a typing error.
MOST_DEVICES = 262_144
_MOST = 2**60  # bytes or elements: more than any machine has

Degree = Annotated[int, Ge(1), Le(MOST_DEVICES)]  # a number of ranks, devices or nodes
Number = Annotated[int, Ge(0), Le(MOST_DEVICES)]  # a number that may be 0
Rows = Annotated[int, Ge(1), Le(2**31)]
Repeats = Annotated[int, Ge(1), Le(2**20)]  # things done in sequence, such as microbatches
Bytes = Annotated[int, Ge(0), Le(_MOST)]
SomeBytes = Annotated[int, Ge(1), Le(_MOST)]
Elements = Annotated[int, Ge(0), Le(_MOST)]
Flops = Annotated[int, Ge(0), Le(10**30)]
Seconds = Annotated[float, Ge(0), Le(1e12)]
SomeSeconds = Annotated[float, Gt(0), Le(1e12)]
Rate = Annotated[float, Gt(0), Le(1e30)]  # of bytes or FLOPs per second
Share = Annotated[float, Ge(0), Le(1)]
FigureNumber = Annotated[float, Ge(0), Le(1e12)]  # money, or a ratio that may exceed 1


MOST_BYTES = 2**27  # of a file that autopar reads
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_given(path: Path, *, what: str, expected: str = "", fix: str = "") -> str:
    """Return the text of a file; `what` names it in messages."""
    check_given(path, what=what, fix=fix)
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(error, path, what=what, fix=fix) from None
    except UnicodeDecodeError:
        raise InputError(
            f"{what} is no text in UTF-8", where=str(path), expected=expected, fix=fix
        ) from None


def check_given(path: Path, *, what: str, fix: str = "") -> None:
    """Raise if a path does not exist, is no file, or is larger than any file that people write."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(error, path, what=what, fix=fix) from None
    if kind := _kind(found):
        raise InputError(
            f"{what} cannot be read: {path} is {kind}", expected="a file", where=str(path), fix=fix
        )
    if found.st_size > MOST_BYTES:
        raise InputError(
            f"{what} has {found.st_size} bytes", where=str(path), expected=f"at most {MOST_BYTES}"
        )


def kind_of(path: Path) -> str:
    """Return the kind of a path that is no file, such as "a pipe"; "" for a file, or if missing."""
    try:
        return _kind(path.stat())
    except (OSError, ValueError):
        return ""


def _kind(found: os.stat_result) -> str:
    return next((name for is_it, name in _KINDS if is_it(found.st_mode)), "")


def _unreadable(error: OSError | ValueError, path: Path, *, what: str, fix: str) -> InputError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return InputError(f"{what} cannot be read: {why}", where=str(path), fix=fix)


_MOST_SHOWN = 5


def is_written(table: object) -> bool:
    """Whether autopar wrote a table: it has a format and a version."""
    return isinstance(table, dict) and type(table.get("format")) is int and "autopar" in table


def check_format(table: Mapping[str, Any], known: int, *, what: str, where: str, fix: str) -> None:
    """Raise if an older or newer autopar wrote a file, in another format than `known`."""
    number = table["format"]
    if number != known:
        newer = "update autopar, or " if number > known else ""
        raise InputError(
            f"autopar {table['autopar']} wrote {what} in format {number}",
            where=where,
            expected=f"format {known}, of this autopar",
            fix=newer + fix,
        )


def validation_messages(error: ValidationError) -> list[str]:
    """Return pydantic's messages, each after its field's path (without the outermost name)."""
    return [
        f"{'.'.join(str(part) for part in one['loc'][1:] or one['loc'])}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False)
    ]


def damaged(faults: Sequence[str], *, what: str, where: str, fix: str) -> InputError:
    """Return one error for all faults of a file; it lists the first few."""
    more = [f"and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
    lines = "".join(f"\n- {fault}" for fault in (*faults[:_MOST_SHOWN], *more))
    return InputError(f"{what} damaged or changed by hand:{lines}", where=where, fix=fix)


_FIX = "choose another place with -o"
_OF_A_FILE = re.compile(r"\.[A-Za-z]\w*")
_MANIFEST, _MARK = "checkpoint.json", re.compile(r'"written_by": *"autopar"')  # of a checkpoint
PLAN_FOLDER = "a folder, which gets plan.json and train.py"
_HEAD_BYTES = 4096
_DEVICES = Path("/dev")  # users may name /dev/stdout


def check_writable(path: Path) -> None:
    """Raise if no file can be written to a path: a folder, a pipe, a place in a checkpoint."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a file", fix=_FIX)
    refuse_in_checkpoint(path)
    kind = kind_of(path)
    if kind and _DEVICES not in path.absolute().parents:
        raise InputError(f"{path} is {kind}, not a file", fix=_FIX)
    folder = next(one for one in path.absolute().parents if os.path.lexists(one))
    if not folder.is_dir():
        kind = "a file, not a folder" if folder.exists() else "a link to what is not there"
        raise InputError(f"{_as_given(folder, path)} is {kind}", where=str(path), fix=_FIX)
    if not os.access(path if path.exists() else folder, os.W_OK):
        found = f"nothing can be written to {_as_given(folder, path)}"
        raise InputError(found, where=str(path), fix=_FIX)


def refuse_in_checkpoint(path: Path) -> None:
    """Raise for a path inside a checkpoint."""
    for folder in (path.resolve(), *path.resolve().parents):
        manifest = folder / _MANIFEST
        if manifest.is_file() and os.access(manifest, os.R_OK) and _MARK.search(_head(manifest)):
            raise InputError(
                f"{path} is in the checkpoint {folder}, which stays as it is", fix=_FIX
            )


def refuse_named_as_file(
    folder: Path, *, option: str = "-o", expected: str = "the name of a folder"
) -> None:
    """Raise if a new folder's name ends like a file's: the user probably means a file."""
    if _OF_A_FILE.fullmatch(folder.suffix) and not folder.exists():
        raise InputError(
            f"{option} {folder} names a file",
            expected=expected,
            fix=f"{option} {folder.with_suffix('')}, or make a folder of that name first",
        )


def refuse_replacing(path: Path, *sources: Path) -> None:
    """Raise if a result would overwrite the file it is made from."""
    if path.exists() and any(one.exists() and path.samefile(one) for one in sources):
        raise InputError(
            "the script would replace the file that it is made from", where=str(path), fix=_FIX
        )


def refuse_others(path: Path, *, beginning: str) -> None:
    """Raise if no file can be written, or if one that is there is not of the kind to be written."""
    check_writable(path)
    if path.is_file() and not _head(path).startswith(beginning):
        found = "a file of another kind is in the way"
        raise InputError(found, where=str(path), fix=_FIX)


def write_whole(path: Path, text: str, *, what: str, mode: int = 0o666) -> None:
    """Write a file completely or not at all; create its folder.

    `mode` is its permissions, restricted by the umask.
    """
    refuse_in_checkpoint(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/stdout, for example
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text, mode)  # the target of a link, not the link
    except OSError as error:
        found = f"{what} cannot be written: {error.strerror}"
        raise InputError(found, where=str(path), fix=_FIX) from None


def _replace(path: Path, text: str, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(mode & ~_umask())  # mkstemp lets only the owner read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", errors="replace")


def _umask() -> int:
    mask = os.umask(0)  # the umask can only be read by setting it
    os.umask(mask)
    return mask


def _as_given(folder: Path, path: Path) -> Path:
    """Return `folder`, a parent of `path`, as a relative path if `path` is relative."""
    above = len(path.absolute().parts) - len(folder.parts)
    return path.parents[above - 1] if above <= len(path.parents) else folder
