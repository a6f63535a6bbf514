"""Turns the storages that come and go into the peak of live bytes, by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage

Owners: TypeAlias = Callable[[], Mapping[int, str]]  # storage -> category, of what has an owner

# Who owns what is looked up again only when a new peak tops the last such by this much: it walks
# over all that lives. What was made since then counts as owned by nobody.
LOOK_UP_EVERY = 1.005


@dataclass(slots=True)
class _Live:
    reference: weakref.ref[UntypedStorage]
    size: int
    unowned: str  # its category while nobody owns it
    category: str


class LiveMemory:
    """Counts the bytes of all storages that are alive."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_by_category: Counter[str] = Counter()
        self._live: dict[int, _Live] = {}
        self._by_category: Counter[str] = Counter()
        self._bytes = 0
        self._looked_up_bytes = 0
        self._owners: Owners | None = None

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        category = "temporary" if _runs_in_backward() else "activations"
        live = _Live(
            reference=weakref.ref(storage, lambda _: self._forget(key)),
            size=0,
            unowned=category,
            category=category,
        )
        self._live[key] = live
        self._resize(live, storage.nbytes())

    def leave_out_host(self, owners: Mapping[int, str], given: Iterable[Tensor]) -> None:
        """Count nothing that lives but what has an owner or is given to the step.

        Rows that are read ahead lie in the memory of the host, which is no other here.
        """
        kept = owners.keys() | {one.untyped_storage()._cdata for one in given}
        for key in self._live.keys() - kept:
            self._resize(self._live[key], 0)

    def start_measuring(self, owners: Owners) -> None:
        """Take the peak from here on."""
        self._owners = owners
        self.peak_bytes = self._looked_up_bytes = 0
        self._note_peak()

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
                self._resize(live, size)
            return result

        with patch.object(UntypedStorage, "resize_", resize_and_count):
            yield

    def _forget(self, key: int) -> None:
        self._resize(self._live.pop(key), 0)

    def _resize(self, live: _Live, size: int) -> None:
        self._bytes += size - live.size
        self._by_category[live.category] += size - live.size
        live.size = size
        self._note_peak()

    def _note_peak(self) -> None:
        if self._owners is None or self._bytes <= self.peak_bytes:
            return
        self.peak_bytes = self._bytes
        if self._bytes > self._looked_up_bytes * LOOK_UP_EVERY:
            self._looked_up_bytes = self._bytes
            self._look_up(self._owners())
        self.peak_by_category = +self._by_category

    def _look_up(self, owners: Mapping[int, str]) -> None:
        """Sort all that lives by its owner."""
        self._by_category.clear()
        for key, live in self._live.items():
            live.category = owners.get(key, live.unowned)
            self._by_category[live.category] += live.size


def _runs_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
