"""Measures what torch's pipeline schedules take their host for an action.

An action is a forward or a backward of one microbatch on one stage. Around it the schedule makes
and waits for messages, keeps inputs and outputs, and calls the module and autograd. Measured is
what a step takes the thread that runs it beyond the same forwards and backwards without a schedule.
Waiting is not counted: that is of messages and of other ranks, which a plan's schedule tells. The
stages sweep the cache, so it is as cold as after the computing of a real one.

Schedules for several stages per rank are longer lists, in which torch looks for what comes next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autopar.planner.costs.ops.measurements import ActionTimes
from autopar.planner.profile.net_rank import slowest
from autopar.planner.profile.ranks import gloo, run_ranks

_SEVERAL = 2  # stages of a rank
_ROUNDS = 2  # of as many microbatches as ranks
_ELEMENTS = 16  # of a message
_SWEPT_BYTES = 4 * 2**20  # more than the cache of a core holds
_REPEATS = 30
_WARM_UP = 3


def action_times(ranks: int) -> ActionTimes:
    """Return the times among processes of this host's CPU."""
    with TemporaryDirectory(prefix="autopar-actions-") as folder:
        run_ranks(_measure, (ranks, folder), ranks=ranks)
        plain, one, several = json.loads(
            (Path(folder) / "actions.json").read_text(encoding="utf-8")
        )
    return ActionTimes(plain_seconds=plain, one_stage_seconds=one, several_stages_seconds=several)


class _Stage(nn.Module):
    """Adds a parameter to what comes in, and sweeps the cache on its way forth and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scratch = torch.zeros(_SWEPT_BYTES // 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        self.sweep()
        out: Any = x + self.weight
        out.register_hook(self.sweep)
        return out  # type: ignore[no-any-return]

    def sweep(self, *_: Tensor) -> None:
        """Read and write more than the cache holds."""
        self.scratch.add_(1.0)


def _measure(rank: int, ranks: int, folder: str) -> None:
    """Measure all kinds of schedule on one rank; the first one writes what was found."""
    kinds = ((1, True), (1, False), (_SEVERAL, False))
    with gloo(rank, ranks, folder):
        found = [
            _action_seconds(rank, ranks, per_rank, is_plain=plain) for per_rank, plain in kinds
        ]
        if rank == 0:
            (Path(folder) / "actions.json").write_text(json.dumps(found), encoding="utf-8")


def _action_seconds(rank: int, ranks: int, per_rank: int, *, is_plain: bool) -> float:
    """Return what a schedule adds to an action, on the slowest rank."""
    microbatches = _ROUNDS * ranks
    modules = [_Stage() for _ in range(per_rank)]
    message = torch.empty(1, _ELEMENTS, device="meta", requires_grad=True)
    stages: list[Any] = [
        PipelineStage(
            module,
            rank + turn * ranks,
            per_rank * ranks,
            torch.device("cpu"),
            input_args=(message,),
            output_args=(message,),
        )
        for turn, module in enumerate(modules)
    ]
    schedule: Any = (
        Schedule1F1B(stages[0], microbatches, loss_fn=_loss)
        if is_plain
        else ScheduleInterleaved1F1B(stages, microbatches, loss_fn=_loss)
    )
    x: Any = torch.zeros(microbatches, _ELEMENTS)
    given = {"target": x} if rank == ranks - 1 else {}
    arguments = (x,) if rank == 0 else ()

    def alone() -> None:
        for module in modules:
            for row in x.split(1):
                _loss(module(row), row).backward()

    pairs = zip(_seconds(lambda: schedule.step(*arguments, **given)), _seconds(alone), strict=True)
    added = median(step - bare for step, bare in pairs)
    return slowest(max(0.0, added) / (2 * microbatches * per_rank), "cpu")


def _loss(output: Tensor, _: Tensor) -> Any:
    return output.mean()


def _seconds(step: Callable[[], object]) -> list[float]:
    """Return what some steps take the thread that runs them."""
    found = []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier()
        began = time.thread_time()
        step()
        found.append(time.thread_time() - began)
    return found[_WARM_UP:]
