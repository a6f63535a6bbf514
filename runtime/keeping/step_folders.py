"""Tells the folders of a training apart: whole checkpoints, unfinished ones, broken ones.

On a disk a checkpoint is written as `step-N.tmp` and renamed when it is whole. In a store, which
cannot rename, it has its name from the start, and is whole once it has its manifest, which is
written last and removed first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autopar.runtime.keeping.manifest import NAME
from autopar.runtime.ranks.locations import Location, StorePath, put, remove_tree, write

STEP, UNFINISHED, BROKEN = "step-", ".tmp", ".broken"


def step_folder(folder: Location, step: int) -> Location:
    """Return where the checkpoint of a step is."""
    return folder / f"{STEP}{step}"


def step_of(path: Location) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix(STEP))


def checkpoints_in(folder: Location) -> list[Location]:
    """Return the checkpoints in a folder, the newest first, but for unfinished ones."""
    found = (one for one in _named(folder) if isinstance(one, Path) or (one / NAME).exists())
    return sorted(found, key=step_of, reverse=True)


def unfinished_in(folder: Location) -> list[Location]:
    """Return what is being written, or was when a training was killed."""
    if isinstance(folder, StorePath):
        return [one for one in _named(folder) if not (one / NAME).exists()]
    return list(folder.glob(f"{STEP}*{UNFINISHED}"))


def begin(place: Location) -> Location:
    """Return an empty folder to write a checkpoint to, which gets its place when it is whole."""
    fresh = _unfinished(place)
    if (place / NAME).exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
    if fresh.exists():  # of a run that was killed while it wrote
        remove_tree(fresh)
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
            remove_tree(gone)
            put(place, gone)
        else:
            (place / NAME).unlink()


def _unfinished(place: Location) -> Location:
    return place.with_name(place.name + UNFINISHED) if isinstance(place, Path) else place


def _named(folder: Location) -> Iterator[Location]:
    """Yield the folders that have the name of a checkpoint."""
    for one in folder.glob(f"{STEP}*") if folder.is_dir() else ():
        if one.name.removeprefix(STEP).isdecimal() and one.is_dir():
            yield one


def _settle(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
