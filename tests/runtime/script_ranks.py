"""Runs a script as a launcher runs its ranks, in processes forked from one that has torch.

The ranks have the environment and the store that torchrun gives them, or another launcher's
environment, and groups of gloo. What
torchrun itself prints, and that it kills ranks when one has left, is seen under torchrun alone.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime.processes import PRELOADED

_SECONDS = 120  # for a machine that is busy
NOTHING: Mapping[str, str] = MappingProxyType({})
Launcher = Callable[[int, int, int], Mapping[str, str]]  # of a rank, the number of ranks, a port


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the ranks of a script have ended, and what they have printed, together."""

    codes: tuple[int | None, ...]
    printed: str


def torchrun_environment(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Return the environment that torchrun gives a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def run_script(
    script: Path,
    words: Sequence[str] = (),
    *,
    ranks: int,
    variables: Mapping[str, str] = NOTHING,
    launcher: Launcher = torchrun_environment,
) -> Ended:
    """Run a script in its folder, with these variables in the environment of all ranks.

    A rank that does not end in time is killed.
    """
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    printed = script.parent / "printed.txt"
    processes = [
        context.Process(
            target=_run,
            args=(
                script,
                tuple(words),
                {**variables, **launcher(rank, ranks, store.port)},
            ),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
        process.kill()
        process.join()
    text = printed.read_text(encoding="utf-8")
    printed.unlink()
    return Ended(codes=tuple(one.exitcode for one in processes), printed=text)


def _run(script: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a script as an interpreter does, which calls a hook for what nothing catches."""
    torch.set_num_threads(1)
    os.environ |= variables
    os.chdir(script.parent)
    printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    try:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
