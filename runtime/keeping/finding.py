"""Finds the checkpoint that a training goes on from: the newest whole one, or one that is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from autopar.runtime.keeping.checking import check_file, expected_files, sound_manifest
from autopar.runtime.keeping.manifest import BrokenError, Manifest, read_moment
from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.keeping.step_folders import checkpoints_in, step_of
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location, location, put
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.outputs import BROKEN
from autopar.runtime.ranks.refusal import refuse

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
