"""Writes a checkpoint at once, as tests that only read one want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing.manifest import Moment
from autopar.runtime.checkpointing.owners import Owners
from autopar.runtime.checkpointing.writing import complete, exported_of, snapshot
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh


def write_checkpoint(
    folder: Location,
    moment: Moment,
    model: str,
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    built: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> str | None:
    """Write a checkpoint, each rank what it owns. Return why it could not be written, if so."""
    exported = exported_of(parts, built, mesh)
    found = snapshot(folder, moment, model, parts, optimizer, Owners(mesh), exported=exported)
    return found if isinstance(found, str) else complete(found, found.write(), mesh)
