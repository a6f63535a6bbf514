"""The context of a part: its device, its time limit, and processes in which it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tests.runtime.processes import Pool

Result = TypeVar("Result")
_IMPORT_SECONDS = 150.0
_SLOWER = 3.0  # how many times as long a CPU may take


@dataclass(slots=True, kw_only=True)
class Context:
    """The device, and until when a part may run. No work on the device is done in this process."""

    device: str  # of torch: "cuda" or "cpu"
    tiny: bool  # small sizes, for a CPU
    models: tuple[str, ...] = ()  # the models whose steps are timed; (): all
    deadline: float = float("inf")  # of time.monotonic()
    pools: dict[int, Pool] = field(default_factory=dict)
    spare: Pool | None = None  # for what needs a fresh process

    @property
    def seconds_left(self) -> float:
        """How long the part may still run."""
        return self.deadline - time.monotonic()

    @property
    def is_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"

    def on_ranks(
        self, function: Callable[..., Result], ranks: int, *args: Any, seconds: float = 60.0
    ) -> list[Result]:
        """Call a function in `ranks` processes, which the next call uses again.

        After a failure they are killed, and the next call gets new ones.
        """
        pool = self.pools.pop(ranks, None) or new_pool(ranks)
        try:
            found = self._called(pool, function, args, seconds)
        except BaseException:
            pool.kill()
            raise
        self.pools[ranks] = pool
        return found

    def _called(
        self, pool: Pool, function: Callable[..., Result], args: tuple[Any, ...], seconds: float
    ) -> list[Result]:
        pool.run(_is_ready, (), max(min(_IMPORT_SECONDS, self.seconds_left), 1.0))
        if self.seconds_left < 1:
            raise TimeoutError("no time is left")
        patience = seconds if self.is_gpu else _SLOWER * seconds
        return pool.run(function, args, min(patience, self.seconds_left))

    def alone(self, function: Callable[..., Result], *args: Any, seconds: float = 60.0) -> Result:
        """Call a function in one process that stays alive."""
        (found,) = self.on_ranks(function, 1, *args, seconds=seconds)
        return found

    def fresh(self, function: Callable[..., Result], *args: Any, seconds: float = 60.0) -> Result:
        """Call a function in a process of its own, which ends afterwards and frees its memory."""
        pool = self.spare or new_pool(1)
        self.spare = new_pool(1) if self.is_gpu else None  # it imports during this call
        try:
            (found,) = self._called(pool, function, args, seconds)
        finally:
            pool.kill()
        return found

    def end(self) -> None:
        """End all processes."""
        for pool in (*self.pools.values(), *([self.spare] if self.spare else [])):
            pool.kill()
        self.pools.clear()
        self.spare = None


def new_pool(ranks: int) -> Pool:
    """Return spawned processes, because forks cannot use the GPU."""
    return Pool(ranks, start_method="spawn", joins=False)


def _is_ready() -> bool:
    return True


def place_here() -> str:
    """Return what torch calls the device, and the version of torch."""
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} CPU cores"
    return f"{name}, torch {torch.__version__}"
