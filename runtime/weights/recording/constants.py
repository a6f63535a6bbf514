"""Keeps the values of real tensors that a constructor reads, as copies or in mapped files.

While a constructor is recorded, it may read real tensors, from a file for example. In the recording
each of them is a meta tensor, its stand-in. The values are kept by the storage of the stand-in.

Memory that is mapped from a file takes no space until a process writes to it. So a mapped tensor is
copied only when it is about to be written to; until then, any slice of it can be read.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Thread, local
from typing import Any, TypeAlias
from unittest.mock import patch
from zipfile import is_zipfile

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

Span: TypeAlias = tuple[int, int]  # of addresses
MAPS = Path("/proc/self/maps")
LEAST_MAPPED_BYTES = 2**16  # smaller tensors are copied at once


@dataclass(frozen=True, slots=True)
class _ReadTensor:
    """A real tensor that was read, with its version at that time."""

    source: weakref.ref[Tensor]
    version: int
    storage: int  # the number of its stand-in's storage in the recording


class Constants:
    """The values of real tensors, by the storages of their stand-ins."""

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}
        self._mapped: dict[int, Span] = {}  # addresses of tensors that are not copied
        self._files: dict[int, Span] = {}  # addresses of the mapped files that contain them
        self._taken: dict[int, _ReadTensor] = {}
        self._maps: list[tuple[weakref.ref[UntypedStorage], Span]] = []  # made by torch

    def __contains__(self, storage: int) -> bool:
        return storage in self._values

    def __getitem__(self, storage: int) -> Tensor:
        return self._values[storage]

    def is_in_file(self, storage: int) -> bool:
        """Whether values are read from a file when they are needed."""
        return storage in self._mapped

    def known(self, real: Tensor) -> int | None:
        """Return the stand-in's storage of a tensor that was read before and has not changed."""
        taken = self._taken.get(id(real))
        if taken is None or taken.source() is not real or taken.version != real._version:
            return None
        is_mapped, read = taken.storage in self._mapped, self._values[taken.storage]
        if is_mapped or torch.equal(bytes_of(read), bytes_of(real)):
            return taken.storage
        return None  # changed through shared memory, such as an array

    def take(self, real: Tensor, storage: int, stand_in: Tensor) -> None:
        """Keep a tensor's values, in the strides of its stand-in."""
        self._taken[id(real)] = _ReadTensor(weakref.ref(real), real._version, storage)
        detached = real.detach()
        file = self._file(real) if real.stride() == stand_in.stride() else None
        if file is not None:
            self._values[storage] = detached
            self._mapped[storage], self._files[storage] = _span(real), file
            return
        copy = torch.empty_strided(stand_in.shape, stand_in.stride(), dtype=real.dtype)
        self._values[storage] = copy.copy_(detached)

    def before_writing(self, written: Iterable[Tensor]) -> None:
        """Copy values that are not copied yet and are about to change."""
        spans = [_span(tensor) for tensor in written] if self._mapped else []
        for storage, (start, stop) in list(self._mapped.items()):
            if any(first < stop and start < end for first, end in spans):
                self._values[storage] = self._values[storage].clone()
                del self._mapped[storage], self._files[storage]

    def note_map(self, storage: UntypedStorage) -> None:
        """Remember that torch has mapped a file, so that only recorded ops write to its memory."""
        start = storage.data_ptr()
        self._maps.append((weakref.ref(storage), (start, start + storage.nbytes())))

    def is_mapped(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a file that is mapped read-only, or privately by torch.

        Arrays may write to other maps, unseen, so their tensors are copied at once.
        """
        return self._file(tensor) is not None

    def _file(self, tensor: Tensor) -> Span | None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        start, stop = _span(tensor)
        if stop - start < LEAST_MAPPED_BYTES:
            return None
        known = (one for one in self._files.values() if one[0] <= start and stop <= one[1])
        is_torchs = any(
            storage() is not None and first <= start and stop <= end
            for storage, (first, end) in self._maps
        )
        return next(known, None) or _file_around(start, stop, may_be_writable=is_torchs)


def stand_in_of(real: Tensor) -> Tensor:
    """Return a meta tensor with a real tensor's strides; contiguous, if the real one has gaps."""
    size = tuple(real.shape)
    dense = torch.empty_like(real, device="meta")  # keeps dense strides
    strides = real.stride() if dense.stride() == real.stride() else None
    if strides is None:
        return torch.empty(size, dtype=real.dtype, device="meta")
    return torch.empty_strided(size, strides, dtype=real.dtype, device="meta")


def _file_around(start: int, stop: int, *, may_be_writable: bool) -> Span | None:
    """Return the mapped part of a file around some addresses; see proc_pid_maps(5)."""
    if sys.platform != "linux":
        return None
    for line in MAPS.read_text().splitlines():
        span, access, _, _, inode, *path = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in span.split("-"))
        if first <= start < end:
            is_written = "w" in access and ("s" in access or not may_be_writable)
            is_file = inode != "0" and bool(path) and not is_written
            return (first, end) if is_file and stop <= end else None
    return None


def _span(tensor: Tensor) -> Span:
    """Return the range of addresses of a tensor's elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


@contextmanager
def loading_maps(constants: Constants) -> Iterator[None]:
    """Let torch.load inside use mmap, and create its tensors outside of the recording.

    Files that torch maps inside are noted; safetensors, too, maps files by torch.
    """
    original = torch.load
    from_file: Any = UntypedStorage.from_file

    @wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(f, (str, os.PathLike))
        if is_path and kwargs.get("mmap") is None and is_zipfile(f):
            kwargs["mmap"] = True
        with _disable_current_modes():
            return original(f, *args, **kwargs)

    def map_file(*args: Any, **kwargs: Any) -> Any:
        storage = from_file(*args, **kwargs)
        constants.note_map(storage)
        return storage

    with (
        patch.object(torch, "load", load),
        patch.object(UntypedStorage, "from_file", staticmethod(map_file)),
    ):
        yield


@contextmanager
def in_all_threads(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a context here, in threads started inside, and in pool workers.

    torch's modes belong to one thread; ops of other threads would not be recorded.
    """
    here = local()
    start, submit = Thread.start, ThreadPoolExecutor.submit

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(here, "is_inside", False):
                return function(*args, **kwargs)
            here.is_inside = True
            try:
                with enter():
                    return function(*args, **kwargs)
            finally:
                here.is_inside = False

        return run

    def started(thread: Thread) -> None:
        thread.run = inside(thread.run)  # type: ignore[method-assign]
        start(thread)

    def submitted(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return submit(pool, inside(function), *args, **kwargs)

    with (
        patch.object(Thread, "start", started),
        patch.object(ThreadPoolExecutor, "submit", submitted),
    ):
        here.is_inside = True
        with enter():
            yield
