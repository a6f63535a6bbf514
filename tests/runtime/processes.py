"""Runs a function on several processes that stay alive from test to test.

The ranks are forked from a server process that has imported torch and what scripts need, so the
first call costs seconds and the later ones milliseconds. Functions and results travel by pickle:
a function must stand at the top of its module. Every call finds a working default process group,
but in a pool whose functions join groups of their own.
"""

import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.strict import group
from tests.strict.log import Log

Result = TypeVar("Result")
LOG = Log()  # of this rank's strict groups, of the call that runs
# Parameters with gradient hooks are cycles through C++, which nothing collects: what a call has
# trained stays, with its process groups, until its processes end.
MOST_CALLS = 5
PRELOADED = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.data",
    "transformers.modeling_utils",  # of which many models in tests are made
    "autopar.codegen.proof.script_rank",
    "autopar.runtime.pipeline",
    # Test modules import these. Without them, each new rank would spend a second on imports.
    "pytest",
    "hypothesis",
    "tests.field.trial",
    __name__,
)


# before freeze_for_good
FREEZE, UNFREEZE, FREEZE_COUNT = gc.freeze, gc.unfreeze, gc.get_freeze_count


MANY_OBJECTS = 20_000


def freeze_for_good() -> None:
    """Keep the collector of garbage from ever looking through the objects that exist now.

    There are hundreds of thousands of them, of torch and transformers. The product freezes objects
    for a while where it records a model or trains, and looks through the others. Here they are
    frozen for good as soon as there are many, such as those of a library that a test has imported.
    """
    FREEZE()
    vars(gc).update(freeze=_freeze_many, unfreeze=lambda: None, get_freeze_count=lambda: 1)


def _freeze_many() -> None:
    """Freeze the objects that exist if there are many of them.

    Garbage goes first: frozen, it would stay, with thousands of classes of models, through which
    torch looks per trace.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        FREEZE()


class RankError(AssertionError):
    """A function that failed or hung on a rank, told with the rank's own traceback."""


class JoinError(RankError):
    """Ranks that could not connect, before any function ran: another process took gloo's port."""


def run_on_ranks(
    function: Callable[..., Result],
    size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    backend: str = "gloo",
) -> list[Result]:
    """Call function(*args) on ranks 0 … size − 1 at once and return their results in that order.

    The backend "strict" is as strict as nccl; see `tests/strict/group.py`.
    """
    try:
        return _run(function, size, args, timeout_seconds, backend)
    except JoinError:
        return _run(function, size, args, timeout_seconds, backend)


def _run(
    function: Callable[..., Result],
    size: int,
    args: tuple[Any, ...],
    timeout_seconds: float,
    backend: str,
) -> list[Result]:
    pool = POOLS.get(size)
    if pool is None or pool.calls == MOST_CALLS:
        _end(size)
        pool = POOLS[size] = Pool(size)
    try:
        return pool.run(function, args, timeout_seconds, backend=backend)
    except RankError:
        _end(size)  # a rank that failed alone leaves the others inside a collective
        raise


def _end(size: int) -> None:
    if pool := POOLS.pop(size, None):
        pool.kill()


class Pool:
    """The processes of one size, each at the other end of a pipe."""

    def __init__(self, size: int, *, start_method: str = "forkserver", joins: bool = True) -> None:
        self.calls = 0
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        context: Any = get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(list(PRELOADED))
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (there, rank, size, self.folder, joins)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        seconds: float,
        *,
        backend: str = "gloo",
    ) -> list[Any]:
        """Send the call to every rank and gather the answers, or say which rank failed how."""
        self.calls += 1
        task = pickle.dumps((function, args, backend))
        for pipe in self.pipes:
            pipe.send_bytes(task)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self.pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(self._describe_hang(set(silent.values())))
            for rank in [rank for pipe, rank in silent.items() if pipe in ready]:
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            succeeded, value = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(1.0)
            code = self.processes[rank].exitcode
            raise RankError(f"rank {rank} died with exit code {code}") from None
        if not succeeded:
            error = JoinError if "connectFullMesh failed" in value else RankError
            raise error(f"rank {rank} failed:\n{value}")
        return value

    def _describe_hang(self, ranks: set[int]) -> str:
        """Ask the silent ranks for their stacks."""
        for rank in ranks:
            with suppress(ProcessLookupError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.3)
        files = {rank: _stack_file(self.folder, rank) for rank in sorted(ranks)}
        stacks = {rank: one.read_text() if one.exists() else "" for rank, one in files.items()}
        return "\n".join(f"rank {rank} hangs:\n{stack}" for rank, stack in stacks.items())

    def kill(self) -> None:
        """End the processes, whatever they wait for."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


POOLS: dict[int, Pool] = {}


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _serve(pipe: Connection, rank: int, size: int, folder: Path, joins: bool) -> None:
    """Answer calls until the parent goes away."""
    torch.set_num_threads(1)
    freeze_for_good()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        for number in range(sys.maxsize):
            try:
                task = pipe.recv_bytes()
            except EOFError:
                break
            store = folder / f"store-{number}" if joins else None
            pipe.send_bytes(_answer_call(task, rank, size, store))
    os._exit(0)  # gloo's threads may wait for peers that are gone


def _answer_call(task: bytes, rank: int, size: int, store: Path | None) -> bytes:
    try:
        function, args, backend = pickle.loads(task)
        if store is not None:
            _join(backend, rank, size, store)
        LOG.events.clear()
        torch.manual_seed(0)
        answer = pickle.dumps((True, function(*args)))
        if dist.is_initialized():
            dist.barrier()  # who ends its groups while another still receives may bring that down
        return answer
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        torch.set_default_dtype(torch.float32)
        gc.enable()
        _drop_extra_groups()


def _join(backend: str, rank: int, size: int, store: Path) -> None:
    """Have the default group be one of this backend."""
    if dist.is_initialized() and dist.get_backend() != backend:
        dist.destroy_process_group()
    if not dist.is_initialized():
        group.register(LOG)
        place = store.as_uri()
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=size)


def _drop_extra_groups() -> None:
    """Leave no group but the default one.

    Device meshes are cycles that hold their groups, and every group of gloo has a thread that wakes
    up a hundred times a second: those of a few tests would keep two cores busy.
    """
    if dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) > 1:
        dist.destroy_process_group()
    gc.collect()
