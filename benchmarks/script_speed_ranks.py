"""Times steps of an emitted script and of a hand-written training, in turns, on two processes."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from autopar.codegen.proof.script_rank import imported
from autopar.runtime.weights.initial_weights import build
from benchmarks import script_speed_by_hand as by_hand
from benchmarks import script_speed_by_hand_tensor as by_hand_tensor
from benchmarks.script_speed_by_hand import Step
from benchmarks.script_step import data_of, mesh_of, step_of

RANKS = 2
STEPS_TO_WARM_UP = 4
BY_HAND: dict[str, Callable[[Any, int], Step]] = {
    "DistributedDataParallel": lambda model, _: by_hand.data_parallel(model),
    "DDP + ZeroRedundancyOptimizer": lambda model, _: by_hand.zero_1(model),
    "fully_shard, kept gathered": lambda model, _: by_hand.zero_2(model),
    "fully_shard": lambda model, _: by_hand.zero_3(model),
    "PipelineStage, Schedule1F1B": by_hand.pipeline,
    "parallelize_module": lambda model, _: by_hand_tensor.tensor_parallel(model),
    "parallelize_module + SequenceParallel": lambda model, _: by_hand_tensor.sequence_parallel(
        model
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A step of each side, right after each other: seconds of the slower rank, CPU time of both."""

    script_seconds: float
    hand_seconds: float
    script_core_seconds: float
    hand_core_seconds: float

    @property
    def ratio(self) -> float:
        """Return how many times as fast the script is."""
        return self.hand_seconds / self.script_seconds

    @property
    def core_ratio(self) -> float:
        """Return how many times as much CPU time the hand-written step takes."""
        return self.hand_core_seconds / self.script_core_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What two ranks measured."""

    pairs: tuple[Pair, ...]
    losses: tuple[float, float]  # of the last step: the script's, the hand-written one's


def timed(script: Path, hand: str, *, pairs: int, folder: Path) -> Timed:
    """Run both trainings on two gloo processes, one thread each, with steps in turns."""
    start_both: Any = spawn  # torch gives it no types
    start_both(_rank, args=(script, hand, pairs, folder), nprocs=RANKS)
    found: Timed = pickle.loads((folder / "timed.pickle").read_bytes())
    return found


def _rank(rank: int, script: Path, hand: str, pairs: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sides = _sides(imported(script), hand)
    taken, core, losses = _in_turns(sides, pairs)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    dist.all_reduce(core)
    dist.all_reduce(losses)
    if rank == 0:
        rows = [
            Pair(
                script_seconds=seconds[0],
                hand_seconds=seconds[1],
                script_core_seconds=core_seconds[0],
                hand_core_seconds=core_seconds[1],
            )
            for seconds, core_seconds in zip(taken.tolist(), core.tolist(), strict=True)
        ]
        found = Timed(pairs=tuple(rows), losses=(float(losses[0]), float(losses[1])))
        (folder / "timed.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    os._exit(0)  # fully_shard's graphs outlive the process group, and threads end in abort()


def _sides(script: Any, hand: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Build both trainings from the same weights, over the same microbatches.

    The script reads its microbatches, with the weights of their losses, within its step. The
    hand-written training gets them beforehand, without weights, because all targets count.
    """
    mesh = mesh_of(script)
    batches = [batch for batch, _ in islice(data_of(script, mesh), script.MICROBATCHES)]
    own = step_of(script, mesh)

    # `_rank` sums the losses of all ranks; with this factor, the sum is the mean over data ranks.
    share = 1 / (mesh.data.size * mesh.tensor.size)
    whole = build(script.new_model, seed=script.SEED)
    step = BY_HAND[hand](whole, script.MICROBATCHES)
    return (
        lambda: share * own(),
        lambda: share * step(batches),
    )


def _in_turns(sides: Sequence[Callable[[], Tensor]], pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Time a step of each side in turns; which one goes first changes from pair to pair."""
    taken = torch.zeros(pairs, len(sides), dtype=torch.float64)
    core = torch.zeros_like(taken)
    losses = torch.zeros(len(sides), dtype=torch.float64)
    for number in range(-STEPS_TO_WARM_UP, pairs):
        order = range(len(sides)) if number % 2 else reversed(range(len(sides)))
        for side in order:
            dist.barrier()
            begun, core_begun = time.perf_counter(), time.process_time()
            losses[side] = sides[side]()
            if number >= 0:
                taken[number, side] = time.perf_counter() - begun
                core[number, side] = time.process_time() - core_begun
    return taken, core, losses
