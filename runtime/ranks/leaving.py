"""Ends a training with one message for all ranks."""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch.distributed as dist
from torch.utils.data import get_worker_info

from autopar.runtime.launchers import TORCHRUN, ProcessPlace, UnknownPlaceError, own_place
from autopar.runtime.texts import masked, plain

_ERASE = "\x1b[K"  # erases from the cursor to the end of the line
_BAR = 30  # characters


def say(text: object, to: TextIO | None = None) -> None:
    """Print a line to stderr or another stream, over a progress bar if there is one.

    Control characters are spelled out, and passwords in URLs are hidden. If the stream is a file on
    a full disk, the line is lost: this must not end a training.
    """
    stream = sys.stderr if to is None else to
    try:
        # One write call: print writes the newline separately, and ranks share the console.
        stream.write(f"{_ERASE if is_terminal(stream) else ''}{plain(str(text))}\n")
        stream.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal, where lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def draw_bar(done: int, whole: int, seconds_left: float) -> None:
    """Draw a progress bar on stdout.

    The cursor stays at the start of the line, so that the next output overwrites the bar.
    """
    filled = _BAR * done // whole
    text = f"step {done:>6}   {'━' * filled}{'─' * (_BAR - filled)} {done / whole:4.0%}"
    text += f"   {timedelta(seconds=round(seconds_left))} left"
    width = shutil.get_terminal_size().columns - 1  # a wrapped line cannot be overwritten
    sys.stdout.write(f"{_ERASE}{text[:width]}\r")
    sys.stdout.flush()


# Exit codes, the same as those of autopar's commands.
USAGE = 2  # bad usage
MISMATCH = 6  # the environment does not fit the plan
FAILED = 7  # the training failed
INTERRUPTED = 130  # by Ctrl-C
RUN_TOKEN = "AUTOPAR_RUN"  # an environment variable of all processes of one `autopar run`
VERDICT = "verdict.json"
_REASON, _READY, _END = "autopar/left", "autopar/gone", "autopar/end"  # keys of a store
_LOOK_SECONDS = 0.5  # between two checks whether another rank is leaving
_POLL_SECONDS = 0.1
_TOGETHER_SECONDS = 0.3  # for the last rank to notice that all leave
_PATIENCE_SECONDS = 10.0  # time for other ranks to learn that one leaves
_CLEANING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The reason why a rank leaves. `autopar run` reads it from the rank's log folder."""

    code: int
    found: str
    fix: str

    def __str__(self) -> str:
        return f"error: {self.found}\n  fix: {self.fix}"


class LeavingError(SystemExit):
    """Raised to end this process, after its message has been printed."""

    def __init__(self, verdict: ExitReason) -> None:
        super().__init__(verdict.code)
        self.verdict = verdict


def leave(verdict: ExitReason) -> NoReturn:
    """Print a message, and end this process and, under a launcher, all other ranks.

    If several ranks leave, only the first one's message is printed, once per node. Every rank
    watches the store of the rendezvous, and leaves when another rank does.
    """
    atexit.unregister(end_all_if_early)
    room = _room()
    verdict = _announce(verdict, room)
    if room is not None:
        with suppress(RuntimeError):  # the store is gone, with torchrun or the first rank
            if not room.begins_to_leave():
                time.sleep(_PATIENCE_SECONDS)  # the watching thread ends this process meanwhile
            room.leave_together()
        _end_undisturbed(verdict.code)
    _leave_groups()
    raise LeavingError(verdict)


class RefusedInWorkerError(Exception):
    """Raised by `refuse` in a DataLoader worker; the worker's rank prints the message and exits."""


def refuse(found: str, *, fix: str) -> NoReturn:
    """Print a problem and its fix, and end all ranks; in a DataLoader worker, raise an error."""
    verdict = ExitReason(MISMATCH, found, fix)
    if get_worker_info() is not None:
        raise RefusedInWorkerError(str(verdict))
    leave(verdict)


def known_place() -> ProcessPlace:
    """Return this process's place among the ranks; exit if the environment does not tell it."""
    try:
        return own_place()
    except UnknownPlaceError as error:
        refuse(str(error), fix=error.fix)


def give_up(found: str, *, fix: str) -> NoReturn:
    """Print why the training cannot go on, and end all ranks."""
    leave(ExitReason(FAILED, found, fix))


@contextmanager
def refusals_of_workers() -> Iterator[None]:
    """Exit if a DataLoader worker used inside raises RefusedInWorkerError."""
    try:
        yield
    except RefusedInWorkerError as error:  # torch has put the worker's traceback before the text
        told = str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()
        found, _, fix = told.removeprefix("error: ").partition("\n  fix: ")
        leave(ExitReason(MISMATCH, found, fix))


def leave_interrupted() -> NoReturn:
    """End all ranks without a message, after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends a second SIGINT
    leave(ExitReason(INTERRUPTED, "", ""))


def tell(verdict: ExitReason) -> None:
    """Print why this rank leaves; the calling thread then ends the process."""
    _announce(verdict, _room())


def _announce(verdict: ExitReason, room: Room | None) -> ExitReason:
    """Print why ranks leave, once per node: the reason of the first rank to leave. Return it."""
    is_told = False
    if room is not None:
        with suppress(RuntimeError):
            verdict = room.first_of(verdict)
            is_told = not room.is_first_here()
    if verdict.found:
        write_beside_logs(VERDICT, json.dumps({"time": time.time(), **asdict(verdict)}))
    if verdict.found and not is_told:
        say(verdict)
    return verdict


def write_beside_logs(name: str, text: str) -> None:
    """Write a file beside this rank's logs, if `autopar run` has started it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if RUN_TOKEN in os.environ and error_file:
        with suppress(OSError):
            Path(error_file).with_name(name).write_text(masked(text), encoding="utf-8")


def end_all_if_early() -> None:
    """End all ranks if this process exits on its own before its training is over."""
    if not dist.is_initialized():  # before start() or after stop()
        return
    found = "the process ends before its training is over, without an error"
    try:
        leave(
            ExitReason(FAILED, found, "look for sys.exit() in the model file, or in what it calls")
        )
    except LeavingError as left:
        _end(left.verdict.code)


def watch_for_leaving_ranks() -> None:
    """Start a thread that ends this process when another rank leaves.

    The main thread may be waiting for that rank in a collective, with nccl for ever. Connections
    break only when the other process ends, and then torchrun kills all remaining ranks.
    """
    room = _room()
    if room is not None and room.ranks > 1:
        # a separate connection, because the main thread may be waiting in the other one
        own = replace(room, store=room.store.clone())
        threading.Thread(target=_watch, args=(own,), daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The store in which leaving ranks agree on one message and on a time to exit.

    Before all ranks have joined, only the ranks of one node use the same keys. Each start by
    torchrun has its own keys.
    """

    store: Any
    rank: int
    ranks: int

    def first_of(self, own: ExitReason) -> ExitReason:
        """Return the verdict of the first rank to leave: `own`, if no other left before."""
        found = self.store.compare_set(_REASON, "", json.dumps(asdict(own)))
        return ExitReason(**json.loads(found))

    def has_verdict(self) -> bool:
        """Whether any rank leaves."""
        return bool(self.store.check([_REASON]))

    def verdict(self) -> ExitReason:
        """Return the first rank's verdict."""
        return ExitReason(**json.loads(self.store.get(_REASON)))

    def is_first_here(self) -> bool:
        """Whether this is the first rank of its node to leave."""
        node = own_place().node
        return bool(self.store.add(f"{_REASON}/{node}", 1) == 1)

    def begins_to_leave(self) -> bool:
        """Whether this is the first thread of its process to leave."""
        return bool(self.store.add(f"{_READY}/{self.rank}", 1) == 1)

    def leave_together(self) -> None:
        """Wait for a common time to exit. torchrun kills the other ranks once one has exited."""
        if self.store.add(_READY, 1) == self.ranks:
            self.store.set(_END, str(time.time() + _TOGETHER_SECONDS))
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self.store.check([_END]):
            if time.monotonic() > until:
                return
            time.sleep(_POLL_SECONDS)
        seconds = float(self.store.get(_END)) - time.time()  # the clocks of two nodes differ
        time.sleep(min(max(seconds, 0.0), _TOGETHER_SECONDS))


def _room() -> Room | None:
    """Return the store in which leaving ranks agree, or None if there is none.

    Only torchrun has a store before the ranks have joined. Under other launchers, a rank that
    leaves earlier cannot tell the others: the scheduler ends them.
    """
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_torchruns and not _has_first_ranks_store():
        return None
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return Room(store=store, rank=dist.get_rank(), ranks=dist.get_world_size())
    with suppress(RuntimeError, ValueError, KeyError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=_PATIENCE_SECONDS)
        store = dist.TCPStore(host, port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        node, start = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        return Room(
            store=dist.PrefixStore(f"autopar/{start}/{node}", store),  # type: ignore[attr-defined]
            rank=int(os.environ["LOCAL_RANK"]),
            ranks=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
    return None


def _has_first_ranks_store() -> bool:
    """Whether the ranks share a store of rank 0, as under every launcher but torchrun."""
    try:
        own = own_place()
    except UnknownPlaceError:
        return False
    return dist.is_initialized() and own.launcher is not TORCHRUN and own.world_size > 1


def _watch(room: Room) -> None:
    """End this process once another rank leaves, unless the main thread ends it."""
    try:
        _leave_with(room)
    except RuntimeError:  # the store is gone
        if _has_first_ranks_store():  # torchrun would end its ranks itself
            _leave_without_first()


def _leave_without_first() -> None:
    """End this process if the first rank was killed before the training was over."""
    time.sleep(_PATIENCE_SECONDS)  # at the end of a training, the first rank may end earlier
    if dist.is_initialized():
        say(ExitReason(FAILED, "the first rank has ended", "look at the output of rank 0"))
        _end(FAILED)


def _leave_with(room: Room) -> None:
    """Wait until another rank leaves or the training is over."""
    while not room.has_verdict():
        time.sleep(_LOOK_SECONDS)
        if not dist.is_initialized():  # the training is over
            return
    verdict = _announce(room.verdict(), room)
    if room.begins_to_leave():
        _clean_up()
        with suppress(RuntimeError):
            room.leave_together()
        os._exit(verdict.code)


def _clean_up() -> None:
    """Run the exit handlers of the interpreter, to release resources."""
    for own in (_end, end_all_if_early):
        atexit.unregister(own)
    cleaning = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    cleaning.start()
    cleaning.join(_CLEANING_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _end(code: int) -> NoReturn:
    """End this process without destroying groups: C++ aborts if their threads still run."""
    _clean_up()
    os._exit(code)


def _end_undisturbed(code: int) -> None:
    """Make sure that this process exits with a code, even if torchrun sends signals meanwhile."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit.register(_end, code)
        # the user's threads may block the exit
        timer = threading.Timer(_CLEANING_SECONDS, _end, (code,))
        timer.daemon = True
        timer.start()


def _leave_groups() -> None:
    """Abort nccl's groups, which would otherwise wait at exit for messages that never come.

    torch's destroy_process_group waits for all ranks, but they may not know that this one leaves.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        with suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
