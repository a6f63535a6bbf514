"""Finds the checkpoint to resume from, and deletes old ones.

Distinguishes complete, unfinished and broken checkpoints among the folders of a training.

On a disk, a checkpoint is written as `step-N.tmp` and renamed when it is complete. In an object
store, which cannot rename, it has its final name from the start, and its manifest is written last
and deleted first. A `step-N` folder that holds no file of a checkpoint belongs to another program.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from autopar.runtime.checkpointing.manifest import (
    NAME,
    BrokenError,
    Manifest,
    manifest_faults,
    read_manifest,
    read_moment,
)
from autopar.runtime.checkpointing.safetensors_file import WrittenFile
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.locations import (
    BROKEN,
    STEP,
    UNFINISHED,
    Location,
    StorePath,
    check_regular,
    located,
    location,
    put,
    size_of,
    write,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import every_rank
from autopar.runtime.texts import in_a_line
from autopar.runtime.weights.stored_tensors import KINDS, open_tensors

_OF_A_RANK = re.compile(r"rank-\d{5,}\.safetensors")


def step_folder(folder: Location, step: int) -> Location:
    """Return the folder of the checkpoint of a step."""
    return folder / f"{STEP}{step}"


def is_step(name: str) -> bool:
    """Whether a checkpoint's folder can have that name."""
    return name.startswith(STEP) and name.removeprefix(STEP).isdecimal()


def step_of(path: Location) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix(STEP))


def checkpoints_in(folder: Location) -> list[Location]:
    """Return the finished checkpoints in a folder, the newest first."""
    named = ((one, {file.name for file in one.iterdir()}) for one in _named_folders(folder))
    found = (
        one
        for one, files in named
        if NAME in files or (isinstance(one, Path) and any(map(is_of_checkpoint, files)))
    )
    return sorted(found, key=step_of, reverse=True)


def is_of_checkpoint(name: str) -> bool:
    """Whether a file of a checkpoint can have that name."""
    return name == NAME or _OF_A_RANK.fullmatch(name) is not None


def unfinished_in(folder: Location) -> list[Location]:
    """Return unfinished checkpoints: being written, or left by a training that was killed."""
    if isinstance(folder, StorePath):
        return [one for one in _named_folders(folder) if not (one / NAME).exists()]
    every = folder.glob(f"{STEP}*{UNFINISHED}") if folder.is_dir() else ()
    return [one for one in every if one.is_dir() and _is_ours(one)]


def _is_ours(folder: Location) -> bool:
    """Whether a folder is empty, or has a file of a checkpoint."""
    names = [one.name for one in folder.iterdir()]
    return not names or any(map(is_of_checkpoint, names))


def remove(folder: Location) -> None:
    """Remove a checkpoint's files. Other files in its folder stay, and keep the folder."""
    with suppress(OSError):
        for one in located(folder, "*"):
            if is_of_checkpoint(one.name):
                one.unlink()
        if isinstance(folder, Path):
            folder.rmdir()


def begin(place: Location) -> Location:
    """Return an empty folder to write a checkpoint to; `put_in_place` gives it its final name."""
    fresh = _unfinished(place)
    if (place / NAME).exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
    if fresh.exists():  # left by a run that was killed while writing
        remove(fresh)
    fresh.mkdir(parents=True)
    return fresh


def put_in_place(fresh: Location, place: Location, manifest: str) -> None:
    """Write the manifest after all ranks' files, and give the folder its final name."""
    write(fresh / NAME, [manifest.encode()])
    if isinstance(fresh, Path) and isinstance(place, Path):
        _settle(fresh)
        fresh.rename(place)
        _settle(place.parent)


def give_up(place: Location) -> None:
    """Mark a checkpoint as unfinished before its removal, which may be interrupted halfway."""
    gone = _unfinished(place)
    with suppress(OSError):
        if isinstance(place, Path):
            remove(gone)
            put(place, gone)
        else:
            (place / NAME).unlink()


def _unfinished(place: Location) -> Location:
    return place.with_name(place.name + UNFINISHED) if isinstance(place, Path) else place


def _named_folders(folder: Location) -> Iterator[Location]:
    """Yield the folders that are named like a checkpoint."""
    for one in folder.glob(f"{STEP}*") if folder.is_dir() else ():
        if is_step(one.name) and one.is_dir():
            yield one


def _settle(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sound_manifest(folder: Location) -> Manifest:
    """Read a manifest; raise BrokenError if its values contradict each other or the folder name."""
    manifest = read_manifest(folder)
    for fault in manifest_faults(manifest):
        raise BrokenError(f"{NAME} has a wrong value: {fault}")
    if is_step(folder.name) and step_of(folder) != manifest.moment.step:
        raise BrokenError(f"{NAME} is of step {manifest.moment.step}")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The contents of a file according to the manifest: the dtype and shape of each tensor."""

    written: WrittenFile
    entries: Mapping[str, tuple[str, tuple[int, ...]]]


def expected_files(manifest: Manifest) -> Mapping[str, Expected]:
    """Return the expected contents of each file, by its name."""
    entries: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for one in manifest.tensors.values():
        for shard in one.shards:
            held = (KINDS[one.dtype], shard.shape)
            entries.setdefault(shard.file, {})[shard.entry] = held
    return {
        name: Expected(written=written, entries=entries.get(name, {}))
        for name, written in sorted(manifest.files.items())
    }


def check_size(file: Location, expected: Expected) -> None:
    """Raise BrokenError if a file is missing or has another size than was written."""
    name, needed = file.name, expected.written.size_bytes
    try:
        check_regular(file)
        size = size_of(file)
        if size != needed:
            raise BrokenError(f"{name} has {size:,} bytes, not {needed:,}")
    except FileNotFoundError:
        raise BrokenError(f"{name} is missing") from None
    except OSError as error:
        raise BrokenError(f"{name} cannot be read: {error.strerror}") from None


def check_file(file: Location, expected: Expected) -> None:
    """Read a whole file and raise BrokenError if it is not as it was written."""
    check_size(file, expected)
    name = file.name
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != expected.written.sha256:
            raise BrokenError(f"{name} has other contents than were written")
        _check_entries(file, expected)
    except (OSError, SafetensorError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BrokenError(f"{name} cannot be read: {said}") from None


def _check_entries(file: Location, expected: Expected) -> None:
    """Raise BrokenError if a file's tensors are not those of the manifest."""
    with open_tensors(file) as opened:
        there = set(opened.keys())
        for name, held in expected.entries.items():
            shown = in_a_line(name)
            if name not in there:
                raise BrokenError(f"{file.name} has no tensor called {shown}")
            entry = opened.get_slice(name)
            if (entry.get_dtype(), tuple(entry.get_shape())) != held:
                found = f"the tensor {shown} in {file.name} has another type or shape"
                raise BrokenError(found)


AUTO, NEVER = "auto", "never"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder, in which all files are as they were written."""

    folder: Location
    manifest: Manifest


def find_checkpoint(folder: Location, resume: str, mesh: Mesh) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None; every byte of it has been verified.

    The ranks share the reading. Broken checkpoints are skipped with a note. If the named checkpoint
    is broken, or all are, the training exits instead of starting over.
    """
    if resume not in (AUTO, NEVER):
        return _named(location(resume).resolve(), folder, mesh)
    candidates = _agreed_candidates(folder, mesh)
    if resume == NEVER and candidates:
        refuse(
            f"{folder} has checkpoints of an earlier training, which are not written over",
            fix="name another --checkpoint folder, or go on from them with --resume auto",
        )
    broken: list[Location] = []
    for one in candidates:
        found = verified(one, mesh)
        if isinstance(found, Manifest):
            _set_aside(broken, mesh)
            return Checkpoint(one, found)
        mesh.say(f"note: the checkpoint {one} is not whole: {found}; trying the one before")
        broken.append(one)
    if broken:
        refuse(
            f"none of the {len(broken)} checkpoints in {folder} is whole",
            fix="name another --checkpoint folder to begin anew, or bring back a copy of one",
        )
    return None


def _named(path: Location, folder: Location, mesh: Mesh) -> Checkpoint:
    found = verified(path, mesh)
    if isinstance(found, str):
        _refuse_named(path, found, mesh)
    later = [one for one in _agreed_candidates(folder, mesh) if step_of(one) > found.moment.step]
    if later:
        refuse(
            f"{folder} has later checkpoints than step {found.moment.step}, such as "
            f"{later[0].name}, which are not written over",
            fix="name another --checkpoint folder for what comes from here on, or move them away",
        )
    return Checkpoint(path, found)


def _refuse_named(path: Location, fault: str, mesh: Mesh) -> NoReturn:
    """Exit because a path is no whole checkpoint; print what it is, and what to name instead."""
    inside = _agreed_candidates(path, mesh)
    whole = next((one for one in inside if isinstance(verified(one, mesh), Manifest)), None)
    if inside:
        named = "none of them is whole: bring back a copy of one"
        refuse(
            f"{path} is a folder of {len(inside)} checkpoints, and --resume names one",
            fix=named if whole is None else f"--resume {whole}, the newest whole one",
        )
    if isinstance(path, Path) and not path.is_dir():
        is_there = path.exists()
        refuse(
            f"{path} is a file, and a checkpoint is a folder" if is_there else f"no {path} exists",
            fix="name the folder of a checkpoint (step-N), or --resume auto for the newest whole "
            "one in the folder --checkpoint",
        )
    refuse(
        f"the checkpoint {path} is not whole: {fault}",
        fix="name another one (step-N), or --resume auto for the newest whole one",
    )


def best_of(checkpoints: Iterable[Location]) -> tuple[int, float] | None:
    """Return the step and loss of the best evaluation among checkpoints that still exist."""
    found = []
    for one in checkpoints:
        with suppress(BrokenError):
            moment = read_moment(one)
            if moment.evaluation is not None:
                found.append((moment.evaluation, moment.step))
    loss, step = min(found, default=(0.0, 0))
    return (step, loss) if found else None


def _agreed_candidates(folder: Location, mesh: Mesh) -> Sequence[Location]:
    here = checkpoints_in(folder) if mesh.rank == 0 else ()
    found: Sequence[Location] = every_rank(here, mesh.world)[0]
    return found


def verify_checkpoint(folder: Location, *, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read a manifest and check this rank's share of the files; may raise BrokenError."""
    manifest = sound_manifest(folder)
    files = expected_files(manifest)
    for name in list(files)[rank::ranks]:
        check_file(folder / name, files[name])
    return manifest


def verified(folder: Location, mesh: Mesh) -> Manifest | str:
    """Return the manifest of a checkpoint, or the fault that any rank found."""
    manifest, wrong = None, None
    try:
        manifest = verify_checkpoint(folder, rank=mesh.rank, ranks=mesh.world.size)
    except BrokenError as error:
        wrong = str(error)
    told = [one for one in every_rank(wrong, mesh.world) if one is not None]
    if told:
        return str(told[0])
    assert manifest is not None
    return manifest


def _set_aside(broken: Sequence[Location], mesh: Mesh) -> None:
    """Rename broken checkpoints, because the training will write new ones under their names."""
    for one in broken if mesh.rank == 0 else ():
        aside = one.with_name(one.name + BROKEN)
        try:
            put(one, aside)
        except OSError as error:
            refuse(
                f"{one} is not whole and cannot be renamed: {error.strerror}", fix="move it away"
            )


def remove_old_checkpoints(folder: Location, keep: int, keep_every: int | None) -> None:
    """Remove old and unfinished checkpoints.

    Keeps those of every `keep_every`-th step, the newest `keep` others, and the one with the best
    evaluation.
    """
    every = checkpoints_in(folder)
    best = best_of(every)
    passing = [one for one in every if keep_every is None or step_of(one) % keep_every]
    for old in passing[keep:]:
        if best is None or step_of(old) != best[0]:
            give_up(old)
    for unfinished in unfinished_in(folder):
        remove(unfinished)
