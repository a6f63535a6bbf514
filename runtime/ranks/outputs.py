"""Refuses places for output where something else lies or belongs, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from autopar.runtime.ranks.locations import Location, check_regular, head_of, located, write
from autopar.runtime.ranks.refusal import refuse

MARK = MappingProxyType({"written_by": "autopar"})  # in what autopar writes, and may replace
MANIFEST = "checkpoint.json"  # what makes a checkpoint of a folder
STEP, UNFINISHED, BROKEN = "step-", ".tmp", ".broken"
_OF_A_STEP = re.compile(rf"{STEP}\d+({re.escape(UNFINISHED)}|{re.escape(BROKEN)})?")
_MARKED = re.compile(rb'"written_by": *"autopar"')
_OF_A_FILE = re.compile(r"\.[A-Za-z]\w*")


def is_named_as_file(text: str, *, but: str = "") -> bool:
    """Whether a text names a file by its ending, as w.bin does; llama-3.1 and w.bin/ are folders.

    A folder that is there is one whatever its name is. `but` is an ending of what is meant.
    """
    with suppress(OSError):  # a name that is too long
        if text.endswith("/") or ("://" not in text and Path(text).is_dir()):
            return False
    _, dot, ending = text.rpartition("/")[2].rpartition(".")
    return bool(_OF_A_FILE.fullmatch(dot + ending)) and dot + ending != but


def refuse_no_file(
    path: Location, *, option: str, fix: str, beside: Location | None = None
) -> None:
    """Leave where a file cannot be, or would be in a checkpoint.

    `beside` is the folder in which this training makes checkpoints, if it does.
    """
    try:
        check_regular(path)
        if path.is_dir():
            refuse(f"{option}: {path} is a folder", fix=fix)
        _refuse_in_checkpoint(path, option=option, fix=fix, beside=beside)
    except OSError as error:  # of a store that lets nobody look, too
        refuse(f"{option}: nothing can be written to {path}: {error.strerror}", fix=fix)


def refuse_no_folder(
    path: Location, *, option: str, fix: str, beside: Location | None = None
) -> None:
    """Leave where a folder cannot be, or would be in a checkpoint."""
    try:
        check_regular(path)
        if path.is_file():
            refuse(f"{option}: {path} is a file", fix=fix)
        _refuse_in_checkpoint(path, option=option, fix=fix, beside=beside)
    except OSError as error:
        refuse(f"{option}: nothing can be written to {path}: {error.strerror}", fix=fix)


def refuse_unwritable(folder: Location, *, fix: str) -> None:
    """Leave where nothing can be written to a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".autopar-{uuid4().hex}.tmp"
        write(probe, ())
        probe.unlink()
    except OSError as error:
        refuse(f"nothing can be written to {folder}: {error.strerror}", fix=fix)


def _refuse_in_checkpoint(
    path: Location, *, option: str, fix: str, beside: Location | None
) -> None:
    for one in _with_all_around(path.resolve()):
        if _is_checkpoint(one, beside):
            refuse(f"{option}: {path} is in the checkpoint {one}, which stays as it is", fix=fix)


def _with_all_around(path: Location) -> Iterator[Location]:
    """Yield a place and the folders around it."""
    if isinstance(path, Path):
        yield from (path, *path.parents)
        return
    while path.name and not path.url.endswith(":/"):
        yield path
        path = path.parent


def _is_checkpoint(folder: Location, beside: Location | None) -> bool:
    """Whether a folder is a checkpoint, or would take the place of one that is to come."""
    with suppress(OSError):  # a folder in which nobody may look
        if _has_manifest(folder):
            return True
        if _OF_A_STEP.fullmatch(folder.name):
            others = located(folder.parent, f"{STEP}*")
            return folder.parent == beside or any(map(_has_manifest, others))
    return False


def _has_manifest(folder: Location) -> bool:
    """Whether a manifest of ours is in a folder: other programs have files of that name, too."""
    file = folder / MANIFEST
    return file.is_file() and _MARKED.search(head_of(file, 200)) is not None
