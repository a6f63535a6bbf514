"""Measures how long a training waits for a checkpoint, written in the background or at once.

    torchrun --nproc-per-node 2 -m benchmarks.checkpoint_stall [--pairs 5] [--layers 24]

A training with ZeRO-1 over all ranks writes checkpoints in both ways, in turns. This prints the
median waits and their ratio (background ÷ at once), how much longer a step takes while a checkpoint
is being written, and how much larger the largest file is than the mean.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import gettempdir

import torch
from torch import nn
from torch.optim import AdamW

from autopar.runtime.checkpointing.manifest import Moment, rank_file
from autopar.runtime.checkpointing.owners import Owners
from autopar.runtime.checkpointing.restoring import CheckpointSaving, SavedCheckpoint
from autopar.runtime.checkpointing.writing import CheckpointSnapshot, snapshot
from autopar.runtime.data_parallel import wrap
from autopar.runtime.optimizer import build_optimizer
from autopar.runtime.ranks import start, stop
from autopar.runtime.ranks.transport import every_rank

ROWS = 64
STEPS = 5  # before each checkpoint, while none is being written


def main() -> None:
    """Train, write checkpoints, and print the times."""
    options = _options()
    mesh = start(pipeline=1, data=int(os.environ.get("WORLD_SIZE", "1")), tensor=1)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = nn.Sequential(*layers).to(mesh.device)
    wrap(model, mesh, zero=1, compute_dtype=torch.float32, units=())
    optimizer = build_optimizer([model], AdamW, zero=1, mesh=mesh)
    rows = torch.randn(ROWS, options.width, device=mesh.device)

    def step() -> float:
        begun = time.perf_counter()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - begun

    def taken(number: int) -> CheckpointSnapshot:
        moment = Moment(step=number, rows=0, updates=0)
        found = snapshot(folder, moment, "", [model], optimizer, owners)
        assert isinstance(found, CheckpointSnapshot), found
        return found

    folder = Path(options.folder) / "checkpoint-stall"
    owners, saving, at_once, beside = Owners(mesh), CheckpointSaving(mesh), [], []
    calm, busy = [], []
    for number in range(options.pairs):
        calm += [step() for _ in range(STEPS)]
        begun = time.perf_counter()
        at_once.append(_whole(saving.write_at_once(taken(2 * number), begun)))
        calm += [step() for _ in range(STEPS)]
        begun = time.perf_counter()
        saving.begin(taken(2 * number + 1), begun)
        while any(every_rank(saving.is_writing, mesh.world)):
            busy.append(step())
        beside.append(_whole(saving.finish()))
    own = (folder / f"step-{2 * options.pairs - 1}" / rank_file(mesh.rank)).stat().st_size
    sizes = every_rank(own, mesh.world)
    stop(mesh)
    if mesh.rank == 0:
        shutil.rmtree(folder)
        _tell(at_once, beside, calm, busy, sizes)


def _whole(saved: SavedCheckpoint) -> SavedCheckpoint:
    assert saved.failure is None, saved.failure
    return saved


def _tell(
    at_once: Sequence[SavedCheckpoint],
    beside: Sequence[SavedCheckpoint],
    calm: Sequence[float],
    busy: Sequence[float],
    sizes: Sequence[int],
) -> None:
    short, long = (median(one.waited_seconds for one in found) for found in (beside, at_once))
    step = median(calm)
    print(f"{sum(sizes) / 1e6:,.0f} MB on {len(sizes)} ranks")
    took = median(one.seconds for one in beside)
    print(f"written at once, a checkpoint stops the training for {long:.3f} s")
    print(f"in the background, it stops it for {short:.3f} s ({short / long:.1%}) of {took:.3f} s")
    print(f"steps take {median(busy or calm) / step:.2f} × as long then ({step * 1e3:.1f} ms)")
    print(f"the largest file is {max(sizes) * len(sizes) / sum(sizes):.4f} × as large as the mean")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", default=gettempdir())
    return parser.parse_args()


if __name__ == "__main__":
    main()
