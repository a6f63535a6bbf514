"""Copies tensors into host memory, and writes them into a .safetensors file.

torch's own allocator of pinned memory rounds each tensor up to a power of two and never frees it.
This file allocates pageable memory and lets the CUDA driver pin it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from autopar.runtime.launchers import memory_groups, own_place
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.locations import Location, write
from autopar.runtime.ranks.metrics import Count
from autopar.runtime.weights.stored_tensors import KINDS

BLOCK_BYTES = 2**26
_ALIGNED_BYTES = 64
_MEMORY = Path("/proc/meminfo")


class HostRoom:
    """Host memory for a copy of this rank's share of a checkpoint; the next one reuses it."""

    def __init__(self) -> None:
        self._memory = _Memory(0, is_locked=False)

    @torch.no_grad()
    def copied(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return copies of tensors in host memory; raise if there is no room."""
        starts, size = [], 0
        for one in tensors:
            starts.append(size)
            size += -(-one.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        is_on_device = any(one.device.type == "cuda" for one in tensors)
        if self._memory.size < size:
            self._memory = _Memory(0, is_locked=False)  # free the old memory first
            # the ranks of this machine together may need more memory than is free
            processes, free = own_place().local_world_size, free_host_bytes()
            if free is not None and size * processes > free:
                raise MemoryError(f"{processes} copies of {size:,} bytes, and {free:,} are free")
            self._memory = _Memory(size, is_locked=is_on_device)
        copies = [
            self._memory.flat[start : start + one.nbytes].view(one.dtype).view(one.shape)
            for start, one in zip(starts, tensors, strict=True)
        ]
        for copy, one in zip(copies, tensors, strict=True):
            copy.copy_(one, non_blocking=True)
        if is_on_device:
            torch.cuda.synchronize()
        return copies


def blocks_of(flat: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of flat tensors in blocks. A block is valid until the next is requested.

    Tensors on a device are copied block by block: one block is copied while another is used.
    """
    staged = _Staged()
    coming: Tensor | None = None
    for part in _parts(flat):
        ready, coming = coming, staged.started(part)
        if ready is not None:
            yield staged.waited(ready)
    if coming is not None:
        yield staged.waited(coming)


def _parts(flat: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in flat:
        is_on_device = tensor.device.type == "cuda"
        yield from tensor.split(BLOCK_BYTES) if is_on_device else (tensor,)  # type: ignore[no-untyped-call]


class _Staged:
    """Two host buffers, used in turn for blocks of device tensors."""

    def __init__(self) -> None:
        self._blocks: list[_Memory] = []
        self._marks: dict[int, Any] = {}

    def started(self, part: Tensor) -> Tensor:
        """Start copying a block to the host and return its buffer.

        A host tensor is returned as it is.
        """
        if part.device.type != "cuda":
            return part
        if not self._blocks:
            self._blocks = [_Memory(BLOCK_BYTES, is_locked=True) for _ in range(2)]
        self._blocks.reverse()
        staged = self._blocks[0].flat[: len(part)]
        staged.copy_(part, non_blocking=True)
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        self._marks[staged.data_ptr()] = mark
        return staged

    def waited(self, part: Tensor) -> memoryview:
        """Return the bytes of a block, after its copy has finished."""
        if (mark := self._marks.pop(part.data_ptr(), None)) is not None:
            mark.synchronize()
        found: memoryview = part.numpy().data
        return found


class _Memory:
    """Host memory; with `is_locked`, the CUDA driver pins it if it can."""

    def __init__(self, size: int, *, is_locked: bool) -> None:
        self.size, self.flat = size, torch.empty(size, dtype=torch.uint8)
        if is_locked and size:
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            driver.cudaHostRegister(self.flat.data_ptr(), size, 0)
            finalize(self, driver.cudaHostUnregister, self.flat.data_ptr())


def free_host_bytes() -> int | None:
    """Return the free memory of this machine or, if that is less, of this process's container."""
    found = []
    with suppress(OSError, StopIteration):
        line = next(one for one in _MEMORY.read_text().splitlines() if "MemAvailable" in one)
        found.append(int(line.split()[1]) * 1024)
    return min([*found, *(group.free_bytes for group in memory_groups())], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file, as its header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the tensor's size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that has been written: its size and the digest of its contents."""

    size_bytes: Count
    sha256: str


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order of the file: widest dtype first, so that each is aligned."""
    return sorted(entries, key=lambda one: (-one.dtype.itemsize, one.name))


def write_tensors(
    path: Location, entries: Sequence[Entry], tensors: Iterator[Tensor], metadata: Mapping[str, str]
) -> WrittenFile:
    """Write tensors in the order of their entries, and flush them to the disk."""
    digest, size = hashlib.sha256(), 0

    def flat() -> Iterator[Tensor]:
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
            if tensor.numel():
                yield as_bytes(tensor)

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size
        blocks: Iterator[bytes | memoryview] = blocks_of(flat())
        for block in chain([_header(entries, metadata)], blocks):
            digest.update(block)
            size += len(block)
            yield block

    write(path, counted())
    return WrittenFile(size_bytes=size, sha256=digest.hexdigest())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the contents of a tensor as contiguous bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def refuse_unknown_types(entries: Iterable[Entry]) -> None:
    """Exit if .safetensors has no name for a tensor's dtype."""
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
