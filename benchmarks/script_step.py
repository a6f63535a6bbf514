"""Turns an emitted script into its training step over synthetic data, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from autopar.runtime.data import Weighed, read_batches
from autopar.runtime.optimizer.building import OptimizerFactory, adamw, build_optimizer
from autopar.runtime.ranks import read_options
from autopar.runtime.ranks.mesh import Mesh, start
from autopar.runtime.ranks.randomness import seed_all
from autopar.runtime.weights.loading import NOTHING_SPLIT, load_weights


def mesh_of(script: Any) -> Mesh:
    """Join the processes that the script's plan needs."""
    names = {axis: axis.upper() for axis in ("pipeline", "data", "tensor")}
    return start(**{axis: getattr(script, name, 1) for axis, name in names.items()})


def data_of(script: Any, mesh: Mesh) -> Iterator[Weighed]:
    """Return synthetic microbatches of this rank, with the weights that the script gives them."""
    options = read_options(["--data", "synthetic"], vars(script))
    rows = (script.MICROBATCHES, script.MICROBATCH)
    targets = getattr(script, "valid_targets", None)
    return read_batches(script.new_batch, options, mesh, rows=rows, targets=targets)


def step_of(script: Any, mesh: Mesh) -> Callable[[], Tensor]:
    """Build the script's training as its `main` does, and return its step."""
    options = read_options(["--data", "synthetic"], vars(script))
    model, recipe = script.build_model(mesh, options.dtype, options.seed)
    data = data_of(script, mesh)
    parts = getattr(model, "parts", [model])
    load_weights(parts, recipe, None, mesh, splits=getattr(script, "SPLITS", NOTHING_SPLIT))
    optimizer = build_optimizer(parts, _maker(script), zero=getattr(script, "ZERO", 0), mesh=mesh)
    seed_all(options.seed, mesh)

    def step() -> Tensor:
        microbatches = list(islice(data, script.MICROBATCHES))
        loss: Tensor = script.train_step(model, optimizer, microbatches, mesh, options.clip)[0]
        return loss

    return step


def _maker(script: Any) -> OptimizerFactory:
    """Return a factory of the optimizer: the model file's, or AdamW with the script's settings."""
    if hasattr(script, "new_optimizer"):
        made: OptimizerFactory = script.new_optimizer
        return made
    return partial(
        adamw, lr=script.LEARNING_RATE, betas=script.BETAS, weight_decay=script.WEIGHT_DECAY
    )
