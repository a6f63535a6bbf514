"""Runs a script as a rank of torchrun that shares the device, and fails in step 4 on rank 1.

`torchrun … -m benchmarks.on_gpu.ranks.faulty_rank SCRIPT DEVICE ACTION ARGUMENTS…`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.codegen.proof.script_rank import imported
from benchmarks.on_gpu import late_group
from benchmarks.on_gpu.ranks.joining import share_device

_STEP = 4
_LONG_CYCLES = int(60 * 1.8e9)  # of a GPU: a minute


def _raise() -> None:
    raise ValueError("this rank fails")


def _busy() -> None:
    if torch.cuda.is_available():
        torch.cuda._sleep(_LONG_CYCLES)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    time.sleep(10_000)


ACTIONS: Mapping[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(10_000),
    "busy": _busy,
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "none": lambda: None,
}


def main(path: str, device: str, action: str, *arguments: str) -> None:
    """Run the script, with the late group in place of nccl."""
    rank, join = int(os.environ["RANK"]), dist.init_process_group
    share_device()
    late_group.register(device)

    def join_late(_: str, **options: Any) -> None:
        join(late_group.NAME, **options | {"device_id": None})

    vars(dist)["init_process_group"] = join_late
    script: Any = imported(Path(path))
    own_step, step = script.train_step, [0]

    def train_step(*args: Any, **kwargs: Any) -> Any:
        step[0] += 1
        if step[0] == _STEP and rank == 1:
            print(f"step {_STEP} begins", flush=True)
            ACTIONS[action]()
        return own_step(*args, **kwargs)

    script.train_step = train_step
    sys.argv[0] = path
    script.main(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
