"""Turns a checkpoint into .safetensors of the whole model, one tensor at a time, on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.keeping.exported import export_dtype, tied_names
from autopar.runtime.keeping.finding import Checkpoint
from autopar.runtime.keeping.manifest import Exported
from autopar.runtime.keeping.model_files import WeightsFile, files_of_model, told, write_model
from autopar.runtime.keeping.places import Destination, check_destination
from autopar.runtime.keeping.reading import Reader
from autopar.runtime.keeping.safetensors_file import Entry, in_file_order
from autopar.runtime.keeping.states import WEIGHT
from autopar.runtime.ranks.locations import Location
from autopar.runtime.tensor.chunks import whole

_FIX = "name another place with -o"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What was exported: where it is, in words, and what is not as its constructor made it."""

    place: str
    rounded: tuple[str, ...]  # buffers of which a training in 16 bits has a rounded copy


def export_weights(checkpoint: Checkpoint, path: Location) -> Weights:
    """Write the weights of a checkpoint to a file, or to a folder in shards, as scripts do."""
    to = Destination(path.resolve())
    check_destination(to, option="-o", fix=_FIX)
    exported = _exported(checkpoint)
    tensors = checkpoint.manifest.tensors
    held = {name: tensors[WEIGHT + name] for name in exported}
    entries = in_file_order(
        Entry(name=name, dtype=export_dtype(held[name].dtype, one.dtype), shape=held[name].shape)
        for name, one in exported.items()
    )
    model = files_of_model(to, entries, tied_names(exported))
    with ExitStack() as files:
        reader = Reader(checkpoint, files)

        def tensor_of(_: WeightsFile, entry: Entry) -> Tensor:
            full = torch.empty(entry.shape, dtype=entry.dtype)
            reader.fill(WEIGHT + entry.name, whole(entry.shape), full)
            return full

        write_model(to, model, tensor_of)
    return Weights(place=told(to, model), rounded=_rounded(checkpoint, entries))


def _exported(checkpoint: Checkpoint) -> Mapping[str, Exported]:
    """Return what an export has; an older checkpoint, which does not say so, has all as it is."""
    tensors, said = checkpoint.manifest.tensors, checkpoint.manifest.exported
    weights = (key.removeprefix(WEIGHT) for key in tensors if key.startswith(WEIGHT))
    every = {name: Exported(dtype=tensors[WEIGHT + name].dtype) for name in weights}
    return {name: said[name] for name in every if name in said} or every


def _rounded(checkpoint: Checkpoint, entries: Sequence[Entry]) -> tuple[str, ...]:
    tensors = checkpoint.manifest.tensors
    return tuple(
        one.name
        for one in entries
        if one.dtype.is_floating_point
        and tensors[WEIGHT + one.name].dtype.itemsize < one.dtype.itemsize
    )
