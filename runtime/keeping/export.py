"""Turns the weights that the ranks hold into .safetensors of the user's whole model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.keeping.holdings import named_tensors, weights_held
from autopar.runtime.keeping.overlaps import overlaps
from autopar.runtime.keeping.owners import Here, Owned, every_rank, owners
from autopar.runtime.keeping.places import INDEX, MARK, Destination, temporary
from autopar.runtime.keeping.safetensors_file import Entry, as_bytes, in_file_order, write_tensors
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.chunks import whole
from autopar.runtime.weights.initial_weights import Recipe

SHARD_BYTES = 5 * 10**9  # as Hugging Face has them


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
    tied, kept = _names(parts, mesh)
    holdings = [one for one in weights_held(parts, optimizer) if one.key in kept]
    owned = owners(holdings, mesh)
    whole_model = _Whole(owned, Here(holdings), recipe, mesh)
    files = list(_files(whole_model.entries, shard_bytes=SHARD_BYTES if to.is_folder else None))
    try:
        for name, entries in files:
            tensors = (whole_model.gathered(one) for one in entries)
            if mesh.rank == 0:
                path = to.path / name if to.is_folder else to.path
                metadata = {"format": "pt", **MARK, **_of_file(tied, entries)}
                write_tensors(temporary(path), entries, tensors, metadata)
            else:
                for _ in tensors:
                    pass
        if mesh.rank == 0:
            _put_in_place(to, files, parts[0])
    except OSError as error:
        refuse(
            f"the trained weights cannot be written to {to.path}: {error.strerror}",
            fix="make room there, or --export another place; what --checkpoint keeps is unharmed",
        )


def _names(parts: Sequence[nn.Module], mesh: Mesh) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return other names of tied weights with the first, and what a state dict has, of all ranks.

    A weight stands in a file under its first name, as Hugging Face and safetensors have it.
    """
    tied: dict[str, str] = {}
    kept: set[str] = set()
    for one in named_tensors(parts):
        if one.is_parameter or one.is_persistent:
            kept.add(one.names[0])
            tied |= dict.fromkeys(one.names[1:], one.names[0])
    ranks = every_rank((tied, kept), mesh)
    every = {name: first for found, _ in ranks for name, first in found.items()}
    return every, frozenset(key for _, found in ranks for key in found)


class _Whole:
    """The tensors of the whole model, which the first rank is sent one by one."""

    def __init__(self, owned: Sequence[Owned], here: Here, recipe: Recipe, mesh: Mesh) -> None:
        self._owned = {key: list(own) for key, own in groupby(owned, key=lambda one: one.key)}
        self._here, self._recipe, self._mesh = here, recipe, mesh

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
        built = self._recipe.dtypes.get(one.key, one.dtype)
        is_exact = one.dtype is torch.float64  # --dtype float64, to compare to the last digits
        return one.dtype if is_exact or not built.is_floating_point else built


def _files(
    entries: Sequence[Entry], *, shard_bytes: int | None
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield the files of a model with what lies in each."""
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for one in entries:
        if shards[-1] and room is not None and room < one.size_bytes:
            shards.append([])
            room = shard_bytes
        shards[-1].append(one)
        room = None if room is None else room - one.size_bytes
    for number, shard in enumerate(shards, start=1):
        several = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        yield f"model{several}.safetensors", shard


def _of_file(tied: Mapping[str, str], entries: Sequence[Entry]) -> dict[str, str]:
    """Return the other names of what is in a file, as safetensors notes them."""
    names = {entry.name for entry in entries}
    return {name: first for name, first in tied.items() if first in names}


def _put_in_place(
    to: Destination, files: Sequence[tuple[str, Sequence[Entry]]], root: nn.Module
) -> None:
    """Replace what an earlier training left by what has been written, and say so."""
    size = sum(one.size_bytes for _, entries in files for one in entries)
    if not to.is_folder:
        os.replace(temporary(to.path), to.path)  # noqa: PTH105 - also over a file, on Windows
        _say(f"the trained weights are in {to.path} ({size / 1e6:,.1f} MB)")
        return
    config_path = to.path / "config.json"
    may_write_config = not config_path.exists() or any(to.earlier())
    to.remove_earlier()
    for name, _ in files:
        temporary(to.path / name).rename(to.path / name)
    if len(files) > 1:
        places = {one.name: name for name, entries in files for one in entries}
        index = {
            "metadata": {"total_size": size, **MARK},
            "weight_map": dict(sorted(places.items())),
        }
        (to.path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config: Any = getattr(root, "config", None)
    if hasattr(config, "to_json_string") and may_write_config:  # which from_pretrained reads
        config_path.write_text(config.to_json_string(), encoding="utf-8")
    _say(f"the trained weights are in {to.path}{os.sep} ({size / 1e6:,.1f} MB)")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
