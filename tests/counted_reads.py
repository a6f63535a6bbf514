"""Counts the bytes that are read of .safetensors files."""

from __future__ import annotations

from typing import Any

import safetensors
from torch import Tensor


class Counting:
    """Counts what is read of safetensors files, slice by slice."""

    def __init__(self) -> None:
        self.bytes = 0
        self._open = safetensors.safe_open

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _File(self._open(*args, **kwargs), self)


class _File:
    def __init__(self, file: Any, counting: Counting) -> None:
        self._file, self._counting = file, counting

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._counting)


class _Slice:
    def __init__(self, whole: Any, counting: Counting) -> None:
        self._whole, self._counting = whole, counting

    def get_shape(self) -> list[int]:
        shape: list[int] = self._whole.get_shape()
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        read: Tensor = self._whole[index]
        self._counting.bytes += read.nbytes
        return read
