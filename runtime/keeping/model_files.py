"""Turns the tensors of a whole model, one at a time, into a .safetensors file or a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from autopar.runtime.keeping.places import INDEX, MARK, Destination, temporary
from autopar.runtime.keeping.safetensors_file import Entry, write_tensors
from autopar.runtime.ranks.locations import put, write

SHARD_BYTES = 5 * 10**9  # as Hugging Face has them


def write_model(
    to: Destination,
    entries: Sequence[Entry],
    tensor_of: Callable[[Entry], Tensor],
    tied: Mapping[str, str],
) -> None:
    """Write tensors in the order of their entries; what lay there stays until all are written."""
    files = list(_files(entries, shard_bytes=SHARD_BYTES if to.is_folder else None))
    for name, own in files:
        path = to.path / name if to.is_folder else to.path
        metadata = {"format": "pt", **MARK, **_of_file(tied, own)}
        write_tensors(temporary(path), own, map(tensor_of, own), metadata)
    if to.is_folder:
        _put_in_folder(to, files)
    else:
        put(temporary(to.path), to.path)


def told(to: Destination, entries: Sequence[Entry]) -> str:
    """Return where weights are, with their size."""
    size = sum(one.size_bytes for one in entries)
    return f"in {to.path}{os.sep if to.is_folder else ''} ({size / 1e6:,.1f} MB)"


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


def _put_in_folder(to: Destination, files: Sequence[tuple[str, Sequence[Entry]]]) -> None:
    """Replace what an earlier training left by what has been written."""
    to.remove_earlier()
    for name, _ in files:
        put(temporary(to.path / name), to.path / name)
    if len(files) > 1:
        places = {one.name: name for name, entries in files for one in entries}
        size = sum(one.size_bytes for _, entries in files for one in entries)
        index = {
            "metadata": {"total_size": size, **MARK},
            "weight_map": dict(sorted(places.items())),
        }
        write(to.path / INDEX, [f"{json.dumps(index, indent=2)}\n".encode()])
