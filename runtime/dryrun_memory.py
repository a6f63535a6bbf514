"""Turns the storages that come and go into the peak of live bytes, by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage

Owners: TypeAlias = Callable[[], Mapping[int, str]]  # storage -> category, of what has an owner

# A new peak is broken down by category only when it tops the last one by this much: the
# breakdown walks over all that lives.
BREAKDOWN_EVERY = 1.002


@dataclass(slots=True)
class _Live:
    reference: weakref.ref[UntypedStorage]
    size: int
    made_in_backward: bool


class LiveMemory:
    """Counts the bytes of all storages that are alive."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_by_category: Counter[str] = Counter()
        self._live: dict[int, _Live] = {}
        self._bytes = 0
        self._broken_down_bytes = 0
        self._owners: Owners | None = None

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        live = _Live(
            reference=weakref.ref(storage, lambda _: self._forget(key)),
            size=storage.nbytes(),
            made_in_backward=_runs_in_backward(),
        )
        self._live[key] = live
        self._add(live.size)

    def start_measuring(self, owners: Owners) -> None:
        """Take the peak from here on."""
        self._owners = owners
        self.peak_bytes = self._broken_down_bytes = 0
        self._add(0)

    def stop_measuring(self) -> None:
        """Leave the peak as it is."""
        self._owners = None

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Notice storages that are emptied and filled in place, as fully_shard does."""
        resize = UntypedStorage.resize_

        def resize_and_count(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live = self._live.get(storage._cdata)
            if live is not None:
                self._add(size - live.size)
                live.size = size
            return result

        with patch.object(UntypedStorage, "resize_", resize_and_count):
            yield

    def _forget(self, key: int) -> None:
        self._bytes -= self._live.pop(key).size

    def _add(self, size: int) -> None:
        self._bytes += size
        if self._owners is None or self._bytes <= self.peak_bytes:
            return
        self.peak_bytes = self._bytes
        if self._bytes > self._broken_down_bytes * BREAKDOWN_EVERY:
            self._broken_down_bytes = self._bytes
            self.peak_by_category = self._break_down(self._owners())

    def _break_down(self, owners: Mapping[int, str]) -> Counter[str]:
        """Sum the live bytes by owner; what has none is an activation or a passing value."""
        totals: Counter[str] = Counter()
        for key, live in self._live.items():
            nobody = "temporary" if live.made_in_backward else "activations"
            totals[owners.get(key, nobody)] += live.size
        return totals


def _runs_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
