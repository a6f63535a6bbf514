"""Lets a model be evaluated so that its training goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase

from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import kept_numbers, seed_all, seed_numbers
from autopar.runtime.ranks.undrawn import Undrawn
from autopar.runtime.recompute.written_buffers import kept_buffers


@contextmanager
def evaluated(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Have a model evaluate: without dropout, by running statistics, without gradients."""
    with untouched(parts, mesh, seed):
        for part in parts:
            part.eval()
        yield


@contextmanager
def computes_as_trained(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Have a model compute what it does in training, but for gradients and random numbers.

    Batch norms go by their running statistics: those of a batch would need the rows of all ranks.
    """
    with untouched(parts, mesh, seed), Undrawn():
        for part in parts:
            for module in part.modules():
                module.training &= not isinstance(module, _NormBase)
        yield


@contextmanager
def untouched(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Leave a model as it is, and random states: modes and buffers are put back.

    There are no gradients. What is drawn for rows is the same each time.
    """
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    modes = [(module, module.training) for part in parts for module in part.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(kept_numbers())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for part in parts:
            stack.enter_context(kept_buffers(part))
        seed_numbers(seed)
        seed_all(seed, mesh)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            _reshard(parts)


def _reshard(parts: Sequence[nn.Module]) -> None:
    """Free gathered parameters: without a backward, fully_shard leaves some of them there."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
