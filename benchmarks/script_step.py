"""Turns an emitted script into its training step over synthetic data, in this process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch import Tensor

from autopar.runtime.mesh import Mesh, start
from autopar.runtime.randomness import seed_all


def mesh_of(script: Any) -> Mesh:
    """Join the processes that the script's plan needs."""
    return start(pipeline=script.PIPELINE, data=script.DATA, tensor=script.TENSOR)


def step_of(script: Any, mesh: Mesh) -> Callable[[], Tensor]:
    """Build the script's training as its `main` does, and return its step."""
    options = script.parsed(["--data", "synthetic"])
    model, recipe = script.built(mesh, options.dtype, options.seed)
    data = script.batches(options, mesh)
    optimizer = script.ready(model, recipe, options, mesh)
    seed_all(options.seed, mesh)

    def step() -> Tensor:
        microbatches = list(islice(data, script.MICROBATCHES))
        loss: Tensor = script.train_step(model, optimizer, microbatches, mesh, options.clip)
        return loss

    return step
