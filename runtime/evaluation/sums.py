"""Turns what microbatches have into sums over all rows, each of which counts once."""

import torch
from torch import Tensor

from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import summed


def once(found: Tensor, times: int) -> Tensor:
    """Return what rows add up to that are there so many times; 0 times, they add nothing."""
    return found / times if times else torch.zeros_like(found)


def over_ranks(own: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over data ranks of what is the same on the other axes."""
    every = summed(own, mesh.world) if mesh.world.size > 1 else own
    return every / (mesh.tensor.size * mesh.pipeline.size)
