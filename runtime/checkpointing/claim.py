"""Claims the folder of checkpoints for one training, so that two trainings do not mix.

A file in the folder names the process that holds it. On the same machine, the process table shows
whether that process still runs. A process on another machine shows it by a heartbeat: it increments
a number in the file. A claim compares no clocks and needs only files, so it works on shared disks
and in object stores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from autopar.runtime.checkpointing.finding import AUTO, NEVER, Checkpoint, find_checkpoint
from autopar.runtime.checkpointing.manifest import Moment
from autopar.runtime.ranks.leaving import refuse, say
from autopar.runtime.ranks.locations import (
    MARK,
    Location,
    location,
    put,
    refuse_no_folder,
    refuse_unwritable,
    text_of,
    write,
    written_at,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import parsed, record
from autopar.runtime.ranks.options import NONE

NAME = ".autopar-in-use.json"
BEAT_SECONDS = 15.0
_MISSED = 4  # heartbeats, after which a process on another machine counts as dead
_SETTLING_SECONDS = 1.0  # by then a process that wrote at the same time has finished writing
_POLL_SECONDS = 1.0
_SEEN_SECONDS = 2 * _MISSED * BEAT_SECONDS  # the age at which a heartbeat is over; 2: clocks differ
_MOST_BYTES = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderHolder:
    """The process that holds a folder."""

    written_by: str = MARK["written_by"]
    word: str  # a random word, unique to this claim
    host: str
    machine: str  # one boot of a machine, or one container: process numbers are unique in it
    process: int
    began: int | None  # ticks since the boot; None if unknown
    folder: str  # its path on that machine
    beats: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether the process number can be looked up here: same machine, same container."""
        return (self.host, self.machine) == (socket.gethostname(), _machine())

    @property
    def may_live(self) -> bool:
        """Whether the holder may still run; a holder on another machine always may."""
        return not self.is_here or is_alive(self.process, self.began)


class TakenError(Exception):
    """Another process holds the folder."""

    def __init__(self, holder: FolderHolder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class Claim:
    """A folder that this process holds, until it releases it or ends."""

    def __init__(self, folder: Location, holder: FolderHolder) -> None:
        self._lost, ended = threading.Event(), threading.Event()
        arguments = (folder, holder, ended, self._lost)
        threading.Thread(target=_beat, args=arguments, daemon=True).start()
        self._release = weakref.finalize(self, _give_back, folder, holder, ended)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the folder because this one missed its heartbeats."""
        return self._lost.is_set()

    def release(self) -> None:
        """Release the folder."""
        self._release()


def claim(folder: Location, *, note: Callable[[str], None] = lambda _: None) -> Claim:
    """Take a folder, or raise TakenError.

    `note` gets a message before this waits for a heartbeat of a holder on another machine.
    """
    holder = _own(folder)
    before = holder_of(folder)
    if before is None and _created(folder, holder):
        return Claim(folder, holder)
    before = before or holder_of(folder)  # another process was faster
    if before is not None and _is_claimed(folder, before, note):
        raise TakenError(before)
    _put(folder, holder)
    time.sleep(_SETTLING_SECONDS)
    now = holder_of(folder)
    if now is not None and now.word != holder.word:
        raise TakenError(now)
    return Claim(folder, holder)


def holder_of(folder: Location) -> FolderHolder | None:
    """Return the holder that a folder's file names; None if there is none, or the folder is a copy.

    A copied folder has a copy of the file, too, but the holder writes only to the original.
    """
    try:
        found = record(FolderHolder, parsed(text_of(folder / NAME, most_bytes=_MOST_BYTES)))
        # a copy has its original at the holder's path; of a folder that was moved, nothing is there
        seen, is_local = Path(found.folder), found.is_here and isinstance(folder, Path)
        is_copy = is_local and seen.is_dir() and not seen.samefile(str(folder))
    except (OSError, ValueError):
        return None
    return None if is_copy else found


def is_claimed(folder: Location) -> bool:
    """Whether a process holds a folder.

    A holder on another machine is judged by the age of its last heartbeat.
    """
    holder = holder_of(folder)
    if holder is None or not holder.may_live:
        return False
    with suppress(OSError):
        return holder.is_here or time.time() - written_at(folder / NAME) < _SEEN_SECONDS
    return False


def is_alive(process: int, begin: int | None) -> bool:
    """Whether the process with this number and this start still runs."""
    if Path("/proc/self/stat").exists():
        return begin is not None and began(process) == begin
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def began(process: int) -> int | None:
    """Return when a process began, or None if unknown; a later process may get the same number."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        state, *rest = text.rpartition(")")[2].split()
        # a zombie has ended, but its parent has not waited for it
        return None if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


def _own(folder: Location) -> FolderHolder:
    process = os.getpid()
    return FolderHolder(
        word=uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        process=process,
        began=began(process),
        folder=str(folder.resolve()) if isinstance(folder, Path) else "",
    )


def _machine() -> str:
    """Return an identifier of this machine or container; others may have the same host name."""
    found = []
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        found.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "/".join(found)


def _is_claimed(folder: Location, holder: FolderHolder, note: Callable[[str], None]) -> bool:
    """Whether a process other than this one holds a folder; may wait to see if it still runs."""
    if holder.is_here:
        return holder.process != os.getpid() and holder.may_live
    seconds = _MISSED * BEAT_SECONDS
    note(f"{folder} is claimed by {holder}: waiting {seconds:.0f} s to see whether it still runs")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        now = holder_of(folder)
        if now is None:
            return False
        if (now.word, now.beats) != (holder.word, holder.beats):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _created(folder: Location, holder: FolderHolder) -> bool:
    """Create the holder's file; return False if it is there already, or if links are impossible."""
    if not isinstance(folder, Path):
        return False
    aside = folder / f"{NAME}.{holder.word}"
    try:
        write(aside, [_text(holder)])
        os.link(aside, folder / NAME)
    except OSError:  # another process was faster, or this disk has no links
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def _put(folder: Location, holder: FolderHolder) -> None:
    """Replace the holder's file at once, so that a reader never finds half of it."""
    if isinstance(folder, Path):
        aside = folder / f"{NAME}.{holder.word}"
        write(aside, [_text(holder)])
        put(aside, folder / NAME)
    else:
        write(folder / NAME, [_text(holder)])


def _text(holder: FolderHolder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _beat(
    folder: Location, holder: FolderHolder, ended: threading.Event, lost: threading.Event
) -> None:
    """Increment the number in the file until the claim ends or another process takes the folder."""
    while not ended.wait(BEAT_SECONDS):
        now = holder_of(folder)
        if now is not None and now.word != holder.word:
            lost.set()
            return
        holder = replace(holder, beats=holder.beats + 1)
        with suppress(OSError):  # a full disk does not end the training
            _put(folder, holder)


def _give_back(folder: Location, holder: FolderHolder, ended: threading.Event) -> None:
    if os.getpid() != holder.process:  # a forked child does not hold the folder
        return
    ended.set()
    with suppress(OSError):
        now = holder_of(folder)
        if now is not None and now.word == holder.word:
            (folder / NAME).unlink()


FOLDER = "checkpoints"  # the default, in which --resume auto looks if --checkpoint names no folder
_FIX = "name another place with --checkpoint, or --checkpoint none to keep nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFolder:
    """The checkpoint to resume from, if any, and the first rank's claim on the folder."""

    found: Checkpoint | None = None
    claim: Claim | None = None


def folder_of(options: argparse.Namespace) -> Location | None:
    """Return the folder of checkpoints: the one named, or the default if --resume is given."""
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
) -> OpenedFolder:
    """Find the checkpoint to resume from, and claim the folder; exit if another training has it.

    `last_step` returns the last step of a training that resumes from a moment. If that step is done
    already, the folder is not claimed: a named checkpoint can be evaluated while the training that
    wrote it still runs.
    """
    if folder is None:
        return OpenedFolder()
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
        return OpenedFolder(found=found)
    return OpenedFolder(found=found, claim=_claimed(folder, mesh) if is_named else own)


def _claimed(folder: Location, mesh: Mesh) -> Claim | None:
    """Claim a folder on the first rank; exit if another process holds it."""
    if mesh.rank != 0 or mesh.is_dry_run:
        return None
    wait = "wait until that has ended, or name another folder with --checkpoint"
    try:
        own = claim(folder, note=lambda text: say(f"note: {text}"))
    except TakenError as error:
        refuse(f"{folder} is in use: {error.holder} writes its checkpoints there", fix=wait)
    except OSError as error:
        refuse(f"nothing can be written to {folder}: {error.strerror}", fix=_FIX)
    return own
