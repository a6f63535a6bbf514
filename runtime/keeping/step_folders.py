"""Tells the folders of a training apart: whole checkpoints, unfinished ones, broken ones.

On a disk a checkpoint is written as `step-N.tmp` and renamed when it is whole. In a store, which
cannot rename, it has its name from the start, and is whole once it has its manifest, which is
written last and removed first. Folders of that name without any file of a checkpoint are others'.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autopar.runtime.keeping.manifest import NAME
from autopar.runtime.ranks.locations import Location, StorePath, located, put, write
from autopar.runtime.ranks.outputs import STEP, UNFINISHED

_OF_A_RANK = re.compile(r"rank-\d{5,}\.safetensors")


def step_folder(folder: Location, step: int) -> Location:
    """Return where the checkpoint of a step is."""
    return folder / f"{STEP}{step}"


def is_step(name: str) -> bool:
    """Whether the folder of a checkpoint has that name."""
    return name.startswith(STEP) and name.removeprefix(STEP).isdecimal()


def step_of(path: Location) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix(STEP))


def checkpoints_in(folder: Location) -> list[Location]:
    """Return the checkpoints in a folder, the newest first, but for unfinished ones."""
    named = ((one, {file.name for file in one.iterdir()}) for one in _named(folder))
    found = (
        one
        for one, files in named
        if NAME in files or (isinstance(one, Path) and any(map(is_of_checkpoint, files)))
    )
    return sorted(found, key=step_of, reverse=True)


def is_of_checkpoint(name: str) -> bool:
    """Whether a file of a checkpoint has that name."""
    return name == NAME or _OF_A_RANK.fullmatch(name) is not None


def unfinished_in(folder: Location) -> list[Location]:
    """Return what is being written, or was when a training was killed."""
    if isinstance(folder, StorePath):
        return [one for one in _named(folder) if not (one / NAME).exists()]
    every = folder.glob(f"{STEP}*{UNFINISHED}") if folder.is_dir() else ()
    return [one for one in every if one.is_dir() and _is_ours(one)]


def _is_ours(folder: Location) -> bool:
    """Whether a folder is empty, or has a file of a checkpoint."""
    names = [one.name for one in folder.iterdir()]
    return not names or any(map(is_of_checkpoint, names))


def remove(folder: Location) -> None:
    """Remove a checkpoint, as far as that can be done; files of others in its folder stay."""
    with suppress(OSError):
        for one in located(folder, "*"):
            if is_of_checkpoint(one.name):
                one.unlink()
        if isinstance(folder, Path):
            folder.rmdir()


def begin(place: Location) -> Location:
    """Return an empty folder to write a checkpoint to, which gets its place when it is whole."""
    fresh = _unfinished(place)
    if (place / NAME).exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
    if fresh.exists():  # of a run that was killed while it wrote
        remove(fresh)
    fresh.mkdir(parents=True)
    return fresh


def put_in_place(fresh: Location, place: Location, manifest: str) -> None:
    """Make a checkpoint of a folder that all ranks have written to."""
    write(fresh / NAME, [manifest.encode()])
    if isinstance(fresh, Path) and isinstance(place, Path):
        _settle(fresh)
        fresh.rename(place)
        _settle(place.parent)


def give_up(place: Location) -> None:
    """Have a folder be an unfinished one, at once: half of a checkpoint would look broken."""
    gone = _unfinished(place)
    with suppress(OSError):
        if isinstance(place, Path):
            remove(gone)
            put(place, gone)
        else:
            (place / NAME).unlink()


def _unfinished(place: Location) -> Location:
    return place.with_name(place.name + UNFINISHED) if isinstance(place, Path) else place


def _named(folder: Location) -> Iterator[Location]:
    """Yield the folders that have the name of a checkpoint."""
    for one in folder.glob(f"{STEP}*") if folder.is_dir() else ():
        if is_step(one.name) and one.is_dir():
            yield one


def _settle(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
