"""Writes the text of a script into its file, but never over a file that the user wrote."""

from __future__ import annotations

from pathlib import Path

from autopar.codegen.script.render import is_unchanged
from autopar.planner.errors import InputError
from autopar.planner.files import check_writable, read_given, write_whole

FILE_NAME = "train.py"


def refuse_overwriting(
    path: Path, *, fix: str = "choose another name with -o, or overwrite it with --force"
) -> None:
    """Raise if a file would be overwritten that is not an unchanged script of autopar."""
    check_writable(path)
    if not path.exists():
        return
    try:
        is_ours = is_unchanged(read_given(path, what="the script"))
    except InputError:
        is_ours = False
    if not is_ours:
        raise InputError(
            "a file that autopar did not write, or that was changed since, is in the way",
            where=str(path),
            fix=fix,
        )


def write_text(text: str, folder: Path, *, force: bool = False) -> Path:
    """Write a script's text into a folder as train.py, and return its path."""
    path = folder / FILE_NAME
    if not force:
        refuse_overwriting(path)
    write_whole(path, text, what="the script")
    return path
