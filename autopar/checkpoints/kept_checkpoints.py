"""Turns a folder of checkpoints into what is known of each: its step, its size, what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.runs.run_record import read_record
from autopar.runtime.keeping.checking import (
    Expected,
    check_file,
    check_size,
    expected_files,
    sound_manifest,
)
from autopar.runtime.keeping.finding import Checkpoint
from autopar.runtime.keeping.manifest import NAME, BrokenError, Manifest
from autopar.runtime.keeping.step_folders import checkpoints_in, step_of, unfinished_in
from autopar.runtime.ranks.locations import Location, located, location, size_of, written_at
from autopar.runtime.ranks.outputs import BROKEN, STEP

FOLDER = "checkpoints"  # in the folder of a run
_UNFINISHED = "being written, or left by a training that was killed"
_BROKEN = "set aside by a training, as it was not whole"


class DamagedCheckpointError(AutoparError):
    """A checkpoint that is not as it was written."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint in a folder; what its manifest says is None where that cannot be read."""

    folder: Location
    faults: tuple[str, ...]
    size_bytes: int
    written_at: float  # seconds since 1970
    manifest: Manifest | None = None

    @property
    def evaluation(self) -> float | None:
        """The loss of an evaluation after the checkpoint's step, if there was one."""
        return None if self.manifest is None else self.manifest.moment.evaluation


def kept_in(folder: Location) -> list[Kept]:
    """Return the checkpoints of a folder, the oldest first; sizes of their files are compared."""
    return [_looked_at(one, check=check_size) for one in _folders(folder)]


def verified_in(folder: Location) -> list[Kept]:
    """Return the checkpoints of a folder, the oldest first, after reading every byte of them."""
    return [_looked_at(one, check=check_file) for one in _folders(folder)]


def left_in(folder: Location) -> Iterator[tuple[Location, str]]:
    """Yield folders that are no checkpoints of a training, with what they are."""
    place = _place(folder)
    yield from ((one, _UNFINISHED) for one in unfinished_in(place))
    yield from ((one, _BROKEN) for one in located(place, f"{STEP}*{BROKEN}"))


def whole_checkpoint(path: Location) -> Checkpoint:
    """Return the checkpoint that is named, or the newest of a folder, or refuse a damaged one."""
    folder = _folders(path)[-1]
    found = _looked_at(folder, check=check_file)
    if found.manifest is None or found.faults:
        raise DamagedCheckpointError(
            "the checkpoint is not whole: " + "; ".join(found.faults),
            where=str(folder),
            fix="name another one, or bring back a copy; `autopar ckpt ls` lists them",
        )
    return Checkpoint(folder, found.manifest)


def _folders(path: Location) -> list[Location]:
    """Return the checkpoint that a path names, or all in a folder or in that of a run."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "is not there"
        raise InputError(f"{path} {found}", expected="a folder of checkpoints, or one of them")
    if (path / NAME).exists() or _is_step(path):
        return [path]
    found_there = sorted(checkpoints_in(_place(path)), key=step_of)
    if not found_there:
        raise InputError(
            f"there are no checkpoints in {path}",
            expected=f"folders such as {STEP}1000, which scripts write with --checkpoint",
        )
    return found_there


def _place(folder: Location) -> Location:
    """Return where the checkpoints of a folder are, which may be that of a run."""
    inside = folder / FOLDER
    if any(checkpoints_in(folder)):
        return folder
    if inside.is_dir():
        return inside
    record = read_record(folder) if isinstance(folder, Path) else None
    return location(record.checkpoints) if record is not None and record.checkpoints else folder


def _is_step(path: Location) -> bool:
    name = path.resolve().name
    return name.startswith(STEP) and name.removeprefix(STEP).split(".")[0].isdecimal()


def _looked_at(folder: Location, *, check: Callable[[Location, Expected], None]) -> Kept:
    """Read the manifest of a checkpoint, and check each of its files; all faults are told."""
    faults: list[str] = []
    manifest = None
    try:
        manifest = sound_manifest(folder)
    except BrokenError as error:
        faults.append(str(error))
    files = {} if manifest is None else expected_files(manifest)
    for name, expected in files.items():
        try:
            check(folder / name, expected)
        except BrokenError as error:
            faults.append(str(error))
    there = [one for one in folder.iterdir() if one.is_file()]
    described = folder / NAME
    return Kept(
        folder=folder,
        faults=tuple(faults),
        size_bytes=sum(map(size_of, there)),
        written_at=written_at(described if described.exists() else folder),
        manifest=manifest,
    )
