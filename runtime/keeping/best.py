"""Brings a training back to the weights of its best evaluation, of which there is a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from autopar.runtime.keeping.finding import Checkpoint, verified
from autopar.runtime.keeping.restoring import restore
from autopar.runtime.keeping.step_folders import step_folder
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh


def go_back(
    folder: Location, best: int, parts: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh
) -> None:
    """Give this rank the weights of the best step; a checkpoint that is not whole is told."""
    place = step_folder(folder, best)
    found = verified(place, mesh)
    if isinstance(found, str):
        told = f"note: the weights of the last step are exported: {place} is not whole ({found})"
    else:
        restore(Checkpoint(place, found), parts, optimizer)
        told = f"the best evaluation was that of step {best:,}: its weights are exported"
    if mesh.rank == 0:
        say(told)
