"""Turns the tensors of a whole model, one at a time, into a .safetensors file or a folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from autopar.runtime.keeping.places import EXPORT_MARK, Destination, written_aside
from autopar.runtime.keeping.safetensors_file import Entry, write_tensors
from autopar.runtime.ranks.locations import put, write
from autopar.runtime.ranks.outputs import MARK
from autopar.runtime.weights.stored_tensors import INDEX

SHARD_BYTES = 5 * 10**9  # as Hugging Face has them


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A .safetensors file of an export: its name in the folder, and what lies in it."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """All files of an export."""

    weights: tuple[WeightsFile, ...]
    indices: Mapping[str, str] = field(default_factory=dict)  # JSON that tells what lies where
    others: Mapping[str, bytes] = field(default_factory=dict)  # such as config.json

    @property
    def size_bytes(self) -> int:
        """Return how long all weights are."""
        return sum(one.size_bytes for file in self.weights for one in file.entries)


def files_of_model(
    to: Destination, entries: Sequence[Entry], tied: Mapping[str, str]
) -> ModelFiles:
    """Return the files of a model under its own names: one file, or shards of a folder.

    `tied` are other names of tied weights, each with the first.
    """
    shards = list(_shards(entries, shard_bytes=SHARD_BYTES if to.is_folder else None))
    weights = tuple(
        WeightsFile(
            name=_shard_name(number, len(shards)) if to.is_folder else to.path.name,
            entries=tuple(own),
            metadata={**EXPORT_MARK, **_of_file(tied, own)},
        )
        for number, own in enumerate(shards, start=1)
    )
    return ModelFiles(weights=weights, indices={INDEX: _index(weights)} if len(shards) > 1 else {})


def write_model(
    to: Destination, files: ModelFiles, tensor_of: Callable[[WeightsFile, Entry], Tensor]
) -> None:
    """Write tensors in the order of their entries; what lay there stays until all are written.

    Other files are written where none of their names are, or where they are of an earlier export.
    """
    folder = to.path if to.is_folder else to.path.parent
    is_again = any(to.earlier())
    others = {
        name: content
        for name, content in files.others.items()
        if is_again or not (folder / name).exists()
    }
    paths = {file.name: folder / file.name for file in files.weights}
    with written_aside(tuple(paths.values())) as aside:
        for file in files.weights:
            path = paths[file.name]
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = map(partial(tensor_of, file), file.entries)
            write_tensors(aside[path], file.entries, tensors, file.metadata)
        foreign = next(to.foreign(), None)  # it has come while this was trained
        if foreign is not None:
            raise FileExistsError(errno.EEXIST, "autopar has not exported it", str(foreign))
        if to.is_folder:
            to.remove_earlier()
        for path in paths.values():
            put(aside[path], path)
    for name, text in files.indices.items():
        write(folder / name, [text.encode()])
    for name, content in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, [content])


def told(to: Destination, files: ModelFiles) -> str:
    """Return where weights are, with their size."""
    return f"in {to.path}{os.sep if to.is_folder else ''} ({files.size_bytes / 1e6:,.1f} MB)"


def _shards(entries: Sequence[Entry], *, shard_bytes: int | None) -> Iterator[list[Entry]]:
    """Yield what lies in each file of a model."""
    shard: list[Entry] = []
    room = shard_bytes
    for one in entries:
        if shard and room is not None and room < one.size_bytes:
            yield shard
            shard, room = [], shard_bytes
        shard.append(one)
        room = None if room is None else room - one.size_bytes
    yield shard


def _shard_name(number: int, count: int) -> str:
    several = f"-{number:05}-of-{count:05}" if count > 1 else ""
    return f"model{several}.safetensors"


def _of_file(tied: Mapping[str, str], entries: Sequence[Entry]) -> dict[str, str]:
    """Return the other names of what is in a file, as safetensors notes them."""
    names = {entry.name for entry in entries}
    return {name: first for name, first in tied.items() if first in names}


def _index(files: Sequence[WeightsFile]) -> str:
    """Return JSON that tells which tensor lies in which shard."""
    places = {one.name: file.name for file in files for one in file.entries}
    size = sum(one.size_bytes for file in files for one in file.entries)
    index = {
        "metadata": {"total_size": size, **MARK},
        "weight_map": dict(sorted(places.items())),
    }
    return f"{json.dumps(index, indent=2)}\n"
