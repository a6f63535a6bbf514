"""Joins processes that share a device to one process group, for as long as a function runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks import mesh
from autopar.runtime.ranks.mesh import Axis
from benchmarks.on_gpu import late_group

_TIMEOUT = timedelta(seconds=60)


def share_device() -> None:
    """Make this process use the first device, as all processes of this machine do.

    A script would take the device of its local rank, and refuse to run if there are too few.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        vars(mesh)["_device"] = lambda: torch.device("cuda", 0)


@contextmanager
def joined_late(device: str, store: str) -> Iterator[None]:
    """Join the processes of a pool in a late group; `store` is a file that does not exist yet."""
    late_group.register(device)
    with _joined(
        late_group.NAME,
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_TIMEOUT,
    ):
        yield


@contextmanager
def joined_alone(device: str) -> Iterator[None]:
    """Make this process a world of its own: with nccl on a GPU, connected at once as in scripts."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    own: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1}
    if device == "cuda":
        own["device_id"] = torch.device("cuda", 0)
    with _joined("nccl" if device == "cuda" else "gloo", **own):
        yield


@contextmanager
def _joined(backend: str, **arguments: Any) -> Iterator[None]:
    share_device()
    if dist.is_initialized():
        dist.barrier()  # if a rank leaves while another one still connects, the other fails
        dist.destroy_process_group()
    dist.init_process_group(backend, **arguments)
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


class _Several(int):
    """A size of one that claims to be more, so that messages are sent along the axis."""

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return True

    __hash__ = int.__hash__


def axis_of_one() -> Axis:
    """Return an axis of this process alone, along which messages are sent all the same."""
    return Axis(0, _Several(1), dist.group.WORLD)
