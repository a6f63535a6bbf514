"""Runs a function on processes of this machine that form a group, and waits, not for ever."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)

from autopar.planner.errors import InputError


def run_ranks(
    function: Callable[..., None],
    arguments: tuple[object, ...],
    *,
    ranks: int,
    timeout_seconds: float = 300.0,
) -> None:
    """Call a function with the rank and the arguments on new processes, all at once.

    A collective that hangs must not hang us.
    """
    start: Any = spawn  # torch gives it no types
    context = start(function, arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + timeout_seconds
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise InputError(
                    f"the collectives were not done after {timeout_seconds:.0f} s",
                    fix="try again on a quieter machine",
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise InputError(f"measuring the collectives failed: {_last_line(error)}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@contextmanager
def gloo(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """Make all ranks a group, each with the threads that it trains with: one."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = dist.FileStore(str(Path(folder) / "store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            dist.destroy_process_group()


def _last_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[-1]
