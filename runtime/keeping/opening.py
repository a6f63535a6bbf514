"""Opens the folder of checkpoints for a training: it is this one's, and says where to go on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from autopar.runtime.keeping.claim import Claim, TakenError, claim
from autopar.runtime.keeping.finding import AUTO, NEVER, Checkpoint, find_checkpoint
from autopar.runtime.keeping.manifest import Moment
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.option_values import NONE
from autopar.runtime.ranks.outputs import refuse_no_folder, refuse_unwritable
from autopar.runtime.ranks.refusal import refuse

FOLDER = "checkpoints"  # where --resume auto looks, if --checkpoint names none
_FIX = "name another place with --checkpoint, or --checkpoint none to keep nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a training goes on from, if anything, and the claim of the first rank."""

    found: Checkpoint | None = None
    claim: Claim | None = None


def folder_of(options: argparse.Namespace) -> Location | None:
    """Return where checkpoints are; who wants to resume need not name the usual folder."""
    resume, text = options.resume, options.checkpoint
    if text != NONE:
        return location(text).resolve()
    if resume in (None, NEVER):
        return None
    return location(FOLDER).resolve() if resume == AUTO else location(resume).resolve().parent


def opened(
    folder: Location | None,
    options: argparse.Namespace,
    mesh: Mesh,
    last_step: Callable[[Moment], int],
) -> Opened:
    """Return what a training goes on from; leave where another one writes into its folder.

    `last_step` tells how many steps the training has that goes on from a moment.
    With nothing left to train, nothing is written: a checkpoint that is named may be evaluated
    while the training that wrote it goes on.
    """
    if folder is None:
        return Opened()
    if mesh.rank == 0:
        refuse_no_folder(folder, option="--checkpoint", fix=_FIX)
        refuse_unwritable(folder, fix=_FIX)
    resume = options.resume or AUTO
    is_named = resume not in (AUTO, NEVER)
    own = None if is_named else _claimed(folder, mesh)
    found = find_checkpoint(folder, resume, mesh)
    moment = found.manifest.moment if found is not None else None
    if moment is not None and moment.step >= last_step(moment):
        if own is not None:
            own.release()
        return Opened(found=found)
    return Opened(found=found, claim=_claimed(folder, mesh) if is_named else own)


def _claimed(folder: Location, mesh: Mesh) -> Claim | None:
    """Have the first rank take a folder; leave where another process has it."""
    if mesh.rank != 0 or mesh.is_dry_run:
        return None
    wait = "wait until that has ended, or name another folder with --checkpoint"
    try:
        own = claim(folder, note=lambda text: say(f"note: {text}"))
    except TakenError as error:
        refuse(f"{folder} is in use: {error.holder} keeps its training there", fix=wait)
    except OSError as error:
        refuse(f"nothing can be written to {folder}: {error.strerror}", fix=_FIX)
    return own
