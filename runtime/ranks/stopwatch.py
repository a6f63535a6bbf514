"""Adds up the time that a rank spends on something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Stopwatch:
    """Seconds spent so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield items; the time until each of them is there is added."""
        while True:
            begun = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begun
            yield item
