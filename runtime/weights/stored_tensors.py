"""Reads slices of tensors in a .safetensors file, and fills this process's part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.runtime.ranks.locations import Location, StorePath, check_regular, size_of
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.metrics import parsed
from autopar.runtime.tensor.shards import (
    Split,
    TensorPlace,
    local_chunks,
    put,
    recorded_chunks,
    split_of,
    starts_on_host,
    with_rows,
)
from autopar.runtime.tensor.slices import Ranges

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {word: dtype for dtype, word in KINDS.items()}
INDEX = "model.safetensors.index.json"  # in a folder; says which file has which tensor
_MOST_HEADER_BYTES = 100 * 10**6  # the limit of safetensors


@contextmanager
def open_tensors(path: Location) -> Iterator[Any]:
    """Open a .safetensors file: on a disk with safetensors, in a store by byte ranges."""
    check_regular(path)
    if isinstance(path, Path):
        with safe_open(path, framework="pt") as file:
            yield file
    else:
        yield _InStore(path)


class _InStore:
    """A file in a store, with the methods of safetensors that are used here."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._begin = 8 + int.from_bytes(path.read_bytes(0, 8), "little")
        if self._begin > _MOST_HEADER_BYTES:
            raise SafetensorError("its header is not valid")
        try:
            header = parsed(path.read_bytes(8, self._begin))
            header.pop("__metadata__", None)
            self._tensors = {name: _Tensor.read(one) for name, one in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SafetensorError("its header is not valid") from None
        ends = [one.end for one in self._tensors.values()]
        if size_of(path) != self._begin + max(ends, default=0):
            raise SafetensorError("it has another size than its header says")
        self._last: tuple[tuple[str, int, int], Tensor] | None = None

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor for slicing, without reading it."""
        return _Slice(self, name, self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        return self.get_slice(name)[...]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read whole rows in one request; keep them, because other columns may be read next."""
        if self._last is None or self._last[0] != (name, start, stop):
            one = self._tensors[name]
            row = math.prod(one.shape[1:]) * one.dtype.itemsize
            low, high = (self._begin + one.begin + row * count for count in (start, stop))
            data = self._path.read_bytes(low, high) if high > low else b""
            if len(data) != high - low:
                raise OSError(0, "it ends too early", str(self._path))
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING
            rows = flat.view(one.dtype).view(stop - start, *one.shape[1:])
            self._last = (name, start, stop), rows
        return self._last[1]


_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Slice:
    """A tensor in a store; indexing reads it."""

    file: _InStore
    name: str
    stored: _Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.stored.shape

    def get_shape(self) -> list[int]:
        """Return the tensor's shape, as safetensors does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the name of the tensor's dtype, as safetensors does."""
        return KINDS[self.stored.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        if not self.shape:
            return self.file.rows(self.name, 0, 1)[0]
        if index is ...:
            return self.file.rows(self.name, 0, self.shape[0])
        start, stop, _ = index[0].indices(self.shape[0])
        return self.file.rows(self.name, start, stop)[(slice(None), *index[1:])]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in a header; its offsets are relative to the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def read(cls, said: Any) -> _Tensor:
        """Parse the tensor's entry in a header; raise an error if it is invalid."""
        dtype, shape, (begin, end) = DTYPES[said["dtype"]], said["shape"], said["data_offsets"]
        if not 0 <= begin <= end or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError
        return cls(dtype, tuple(shape), begin, end)


class TensorSource(Protocol):
    """A whole tensor, in memory or in a file, that can be sliced."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read a slice."""
        ...


class ShapeError(ValueError):
    """A source has another shape than the tensor that it should fill."""


def fill(
    group: list[TensorPlace],
    source: TensorSource | None,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Replace a meta tensor, in all its places, by a real one with this rank's part of the source.

    A tensor that was sharded on meta keeps its chunks, including the rows of `fully_shard`. Any
    other tensor is cut according to `splits`. Without a source, memory is only allocated.
    """
    from torch.distributed.tensor import DTensor  # slow, and planning does not need it

    old = group[0].tensor
    known = recorded_chunks(group[0].module, group[0].attribute)
    chunks = known or local_chunks(tuple(old.shape), split_of(group, splits), axis)
    if chunks.global_shape != shape:
        raise ShapeError(f"{group[0].name} is {chunks.global_shape} here and {shape} in its source")
    mine = with_rows(chunks, old)
    there = torch.device("cpu") if starts_on_host(old) else device
    if isinstance(old, DTensor):  # not by from_local, which moves what starts on the host
        sharded: Any = torch.empty_like(old, device=there)
        fresh, own = sharded, sharded._local_tensor
    else:
        own = fresh = torch.empty(mine.local_shape, dtype=old.dtype, device=there)
    if source is not None:
        own.copy_(read(source, mine.ranges))
    put(group, fresh, chunks)


def read(source: TensorSource, ranges: tuple[Ranges, ...], index: tuple[slice, ...] = ()) -> Tensor:
    """Read the ranges of every dim, concatenated."""
    if len(index) == len(ranges):
        return source[index] if index else source[...]
    dim = len(index)
    pieces = [
        read(source, ranges, (*index, slice(start, stop)))
        for start, stop in ranges[dim] or ((0, 0),)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def in_float64(model: nn.Module) -> nn.Module:
    """Convert a model to float64, complex tensors to complex128, in place; return it.

    model.to(torch.float64) would drop the imaginary parts of complex tensors.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            tensor.data = tensor.data.to(wide)
    return model
