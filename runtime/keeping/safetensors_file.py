"""Turns tensors, one at a time, into a .safetensors file: never are all of them in memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.keeping.host_copies import blocks_of
from autopar.runtime.ranks.locations import Location, write
from autopar.runtime.ranks.records import Count
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.weights.stored_tensors import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file: what its header says of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """How long it is in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that has been written: its size, and what stands for its content."""

    size_bytes: Count
    sha256: str


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries as files have them: wide numbers first, so that each lies aligned."""
    return sorted(entries, key=lambda one: (-one.dtype.itemsize, one.name))


def write_tensors(
    path: Location, entries: Sequence[Entry], tensors: Iterator[Tensor], metadata: Mapping[str, str]
) -> Written:
    """Write tensors as they come, in the order of their entries, and have them on the disk."""
    digest, size = hashlib.sha256(), 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size
        for block in _blocks(entries, tensors, metadata):
            digest.update(block)
            size += len(block)
            yield block

    write(path, counted())
    return Written(size_bytes=size, sha256=digest.hexdigest())


def _blocks(
    entries: Sequence[Entry], tensors: Iterator[Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    def flat() -> Iterator[Tensor]:
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
            if tensor.numel():
                yield as_bytes(tensor)

    yield _header(entries, metadata)
    yield from blocks_of(flat())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, row by row, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def refuse_unknown_types(entries: Iterable[Entry]) -> None:
    """Leave where a tensor is of a type that no file can hold."""
    for entry in entries:
        if entry.dtype not in KINDS:
            refuse(
                f"{entry.name} is of {entry.dtype}, which .safetensors files cannot hold",
                fix="leave it out of the model's state dict (persistent=False), or --export none",
            )


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    found: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    refuse_unknown_types(entries)
    for entry in entries:
        found[entry.name] = {
            "dtype": KINDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.size_bytes],
        }
        offset += entry.size_bytes
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
