"""Reads the files that people give: told what is no file, too large or no text; a BOM is let be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autopar.planner.errors import InputError

MOST_BYTES = 2**27  # a plan of a thousand layers has 30 MB
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_given(path: Path, *, what: str, expected: str = "", fix: str = "") -> str:
    """Return the text of a file; `what` it is and what to do stand in messages."""
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
    """Refuse what is not there, is no file, or is larger than any that people write."""
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
    """Return what a path leads to that is no file, such as a pipe; "" for a file, or nothing."""
    try:
        return _kind(path.stat())
    except (OSError, ValueError):
        return ""


def _kind(found: os.stat_result) -> str:
    return next((name for is_it, name in _KINDS if is_it(found.st_mode)), "")


def _unreadable(error: OSError | ValueError, path: Path, *, what: str, fix: str) -> InputError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return InputError(f"{what} cannot be read: {why}", where=str(path), fix=fix)
