"""Finds the checkpoint to go on from, and which to let go of.

Tells the folders of a training apart: whole checkpoints, unfinished ones, broken ones.

On a disk a checkpoint is written as `step-N.tmp` and renamed when it is whole. In a store, which
cannot rename, it has its name from the start, and is whole once it has its manifest, which is
written last and removed first. Folders of that name without any file of a checkpoint are others'.
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

from safetensors import SafetensorError

from autopar.runtime.checkpointing.manifest import (
    NAME,
    BrokenError,
    Manifest,
    manifest_faults,
    read_manifest,
    read_moment,
)
from autopar.runtime.checkpointing.owners import every_rank
from autopar.runtime.checkpointing.safetensors_file import Written
from autopar.runtime.ranks.leaving import in_a_line, say
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
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.weights.stored_tensors import KINDS, open_tensors

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
    named = ((one, {file.name for file in one.iterdir()}) for one in _named_folders(folder))
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
        return [one for one in _named_folders(folder) if not (one / NAME).exists()]
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


def _named_folders(folder: Location) -> Iterator[Location]:
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


def sound_manifest(folder: Location) -> Manifest:
    """Read a manifest that agrees with itself and with its folder, or raise BrokenError."""
    manifest = read_manifest(folder)
    for fault in manifest_faults(manifest):
        raise BrokenError(f"{NAME} has a wrong value: {fault}")
    if is_step(folder.name) and step_of(folder) != manifest.moment.step:
        raise BrokenError(f"{NAME} is of step {manifest.moment.step}")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a manifest says of a file, and of each tensor in it: its type and its shape."""

    written: Written
    entries: Mapping[str, tuple[str, tuple[int, ...]]]


def expected_files(manifest: Manifest) -> Mapping[str, Expected]:
    """Return what a manifest says of each file, by its name."""
    entries: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for one in manifest.tensors.values():
        for shard in one.shards:
            held = (KINDS[one.dtype], shard.chunks.local_shape)
            entries.setdefault(shard.file, {})[shard.entry] = held
    return {
        name: Expected(written=written, entries=entries.get(name, {}))
        for name, written in sorted(manifest.files.items())
    }


def check_size(file: Location, expected: Expected) -> None:
    """Raise BrokenError where a file is missing, or has another size than was written."""
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
    """Raise BrokenError where a file is not what was written; all of it is read."""
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
    """Raise BrokenError where a file has not the tensors that the manifest says are in it."""
    with open_tensors(file) as opened:
        there = set(opened.keys())
        for name, held in expected.entries.items():
            shown = in_a_line(name)
            if name not in there:
                raise BrokenError(f"{file.name} has none of the tensors called {shown}")
            entry = opened.get_slice(name)
            if (entry.get_dtype(), tuple(entry.get_shape())) != held:
                found = f"of the tensors in {file.name} {shown} has another type or shape"
                raise BrokenError(found)


AUTO, NEVER = "auto", "never"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files are all as they were written."""

    folder: Location
    manifest: Manifest


def find_checkpoint(folder: Location, resume: str, mesh: Mesh) -> Checkpoint | None:
    """Return what to go on from, if there is anything; every byte of it has been verified.

    The ranks share the reading out. Checkpoints that are not whole are passed over, and named; if
    none of several is whole, or the named one is not, the training does not begin anew by itself.
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
        _note(f"the checkpoint {one} is not whole: {found}; the one before is looked at", mesh)
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
        refuse(
            f"the checkpoint {path} is not whole: {found}",
            fix="name another one (step-N), or --resume auto for the newest whole one",
        )
    later = [one for one in _agreed_candidates(folder, mesh) if step_of(one) > found.moment.step]
    if later:
        refuse(
            f"{folder} has later checkpoints than step {found.moment.step}, such as "
            f"{later[0].name}, which are not written over",
            fix="name another --checkpoint folder for what comes from here on, or move them away",
        )
    return Checkpoint(path, found)


def best_of(checkpoints: Iterable[Location]) -> tuple[int, float] | None:
    """Return the step and the loss of the best evaluation that has one of these checkpoints."""
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
    found: Sequence[Location] = every_rank(here, mesh)[0]
    return found


def verify_checkpoint(folder: Location, *, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read a manifest and compare this rank's share of the files with it, or raise BrokenError."""
    manifest = sound_manifest(folder)
    files = expected_files(manifest)
    for name in list(files)[rank::ranks]:
        check_file(folder / name, files[name])
    return manifest


def verified(folder: Location, mesh: Mesh) -> Manifest | str:
    """Return the manifest of a checkpoint, or what any rank found wrong with it."""
    manifest, wrong = None, None
    try:
        manifest = verify_checkpoint(folder, rank=mesh.rank, ranks=mesh.world_size)
    except BrokenError as error:
        wrong = str(error)
    told = [one for one in every_rank(wrong, mesh) if one is not None]
    if told:
        return str(told[0])
    assert manifest is not None
    return manifest


def _set_aside(broken: Sequence[Location], mesh: Mesh) -> None:
    """Make room for what will be written under the names of broken checkpoints."""
    for one in broken if mesh.rank == 0 else ():
        aside = one.with_name(one.name + BROKEN)
        try:
            put(one, aside)
        except OSError as error:
            refuse(
                f"{one} is not whole and cannot be renamed: {error.strerror}", fix="move it away"
            )


def _note(text: str, mesh: Mesh) -> None:
    if mesh.rank == 0:
        say(f"note: {text}")


def let_go(folder: Location, keep: int, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints, the best and those that stay, and unfinished ones."""
    every = checkpoints_in(folder)
    best = best_of(every)
    passing = [one for one in every if keep_every is None or step_of(one) % keep_every]
    for old in passing[keep:]:
        if best is None or step_of(old) != best[0]:
            give_up(old)
    for unfinished in unfinished_in(folder):
        remove(unfinished)
