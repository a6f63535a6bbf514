"""Turns the weights that the ranks hold into .safetensors of the user's whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.keeping.exported import export_dtype, exported_of, tied_names
from autopar.runtime.keeping.holdings import weights_held
from autopar.runtime.keeping.manifest import Exported
from autopar.runtime.keeping.model_files import told, write_model
from autopar.runtime.keeping.overlaps import overlaps
from autopar.runtime.keeping.owners import Here, Owned, Owners
from autopar.runtime.keeping.places import Destination
from autopar.runtime.keeping.safetensors_file import Entry, as_bytes, in_file_order
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location, write
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.chunks import whole
from autopar.runtime.weights.initial_weights import Recipe

CONFIG = "config.json"


@torch.no_grad()
def export(
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    recipe: Recipe,
    to: Destination | None,
    mesh: Mesh,
) -> None:
    """Write the weights of the whole model, of which each rank holds a part.

    The first rank writes. It is sent one tensor at a time, so no rank ever holds the whole model.
    Types are those that the model was built in, of fp32 copies where the training has them: a
    person who built a model in fp32 and trains it in 16 bits gets what the optimizer has.
    """
    if to is None:
        return
    exported = exported_of(parts, recipe.dtypes, mesh)
    holdings = [one for one in weights_held(parts, optimizer) if one.key in exported]
    owned = Owners(mesh).of(holdings)
    whole_model = _Whole(owned, Here(holdings), exported, recipe, mesh)
    entries = whole_model.entries
    try:
        if mesh.rank == 0:
            is_config_free = not (to.path / CONFIG).exists() or any(to.earlier())
            write_model(to, entries, whole_model.gathered, tied_names(exported))
            if to.is_folder and is_config_free:
                _write_config(to.path / CONFIG, parts[0])
            say(f"the trained weights are {told(to, entries)}")
        else:
            for one in entries:
                whole_model.gathered(one)
    except OSError as error:
        refuse(
            f"the trained weights cannot be written to {to.path}: {error.strerror}",
            fix="make room there, or --export another place; what --checkpoint keeps is unharmed",
        )


class _Whole:
    """The tensors of the whole model, which the first rank is sent one by one."""

    def __init__(
        self,
        owned: Sequence[Owned],
        here: Here,
        exported: Mapping[str, Exported],
        recipe: Recipe,
        mesh: Mesh,
    ) -> None:
        self._owned = {key: list(own) for key, own in groupby(owned, key=lambda one: one.key)}
        self._here, self._exported = here, exported
        self._recipe, self._mesh = recipe, mesh

    @property
    def entries(self) -> list[Entry]:
        """Return them as files have them: under every plan in the same order."""
        return in_file_order(
            Entry(name=key, dtype=self._dtype(own[0]), shape=own[0].held.global_shape)
            for key, own in self._owned.items()
        )

    def gathered(self, entry: Entry) -> Tensor:
        """Return a whole tensor on the first rank; others send it what they own, and get nothing.

        All ranks come here for every tensor, in one order.
        """
        owned = self._owned[entry.name]
        first = self._mesh.rank == 0
        full = torch.empty(entry.shape if first else (0,), dtype=owned[0].dtype)
        for one in owned:
            piece = self._moved(one)
            for target, source in overlaps(whole(entry.shape), one.chunks) if first else ():
                full[target] = piece[source]
        return self._as_built(full, entry) if first else full

    def _moved(self, one: Owned) -> Tensor:
        """Return a piece, once it has come from its rank to the first."""
        mesh, shape = self._mesh, one.chunks.local_shape
        if one.rank == mesh.rank:
            piece = self._here.tensor(one)
            if mesh.rank != 0 and piece.numel():
                dist.send(as_bytes(piece), dst=0, group=mesh.world.group)
            return piece.cpu() if mesh.rank == 0 else piece
        if mesh.rank != 0:
            return torch.empty(0)
        size = one.chunks.elements * one.dtype.itemsize
        sent = torch.empty(size, dtype=torch.uint8, device=mesh.device)
        if size:
            dist.recv(sent, src=one.rank, group=mesh.world.group)
        return sent.cpu().view(one.dtype).view(shape)

    def _as_built(self, full: Tensor, entry: Entry) -> Tensor:
        """Return a tensor in the type that the constructor gave it.

        A constant table of which a training in 16 bits has a rounded copy is made anew.
        """
        if full.dtype in HALF_DTYPES and entry.dtype is torch.float32:
            made = self._recipe.make(entry.name)
            if made.shape == full.shape and torch.equal(made.to(full.dtype), full):
                return made
        return full.to(entry.dtype)

    def _dtype(self, one: Owned) -> torch.dtype:
        return export_dtype(one.dtype, self._exported[one.key].dtype)


def _write_config(path: Location, root: nn.Module) -> None:
    """Leave beside the shards what from_pretrained reads, where the model has it."""
    config: Any = getattr(root, "config", None)
    if hasattr(config, "to_json_string"):
        write(path, [config.to_json_string().encode()])
