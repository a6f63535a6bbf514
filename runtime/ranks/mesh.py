"""The axes of ranks and their groups, joined once at the start.

Turns the degrees of a plan and torchrun's environment into the mesh of this process.

An axis belongs to the mesh, a dim to a tensor. The tensor axis is the fastest, so that its ranks
are neighbours on the quickest links; then data, whose ranks that share one sharded copy are
neighbours; the pipeline axis is the slowest:

    rank = (pipeline · data_size + data) · tensor_size + tensor
    data = replica · shard_size + shard
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from autopar.runtime.ranks.leaving import RUN_TOKEN, leave_with_others
from autopar.runtime.ranks.network import joining_nodes, store_of
from autopar.runtime.ranks.options import number_in
from autopar.runtime.ranks.refusal import refuse

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


_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def stop_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it ends; elsewhere than on Linux, no.

    Without it the ranks of a torchrun that was killed would train on, and nobody would know.
    """
    if _prctl is not None:
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


_STDOUT, _STDERR = 1, 2


def join_streams() -> None:
    """Do so in a rank that `autopar run` has started; all other processes keep both streams.

    torchrun follows a file for each stream, and shows what is new in each of them now and then.
    """
    if RUN_TOKEN in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(_STDOUT, _STDERR)


DRY_RUN = "AUTOPAR_DRYRUN"
# How long a message may take, in steps, and at least: the watch over steps, which knows more of
# what stands still, is to come first (keeping/watch.py).
_STEPS_OF_MESSAGE = 4
_LEAST_TIMEOUT = timedelta(minutes=30)
_LEAST_START = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the mesh as this process sees it; size 1 has no group and costs nothing."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    is_gloo: bool = False  # which has no mean, see data_parallel/averaging.py


ALONE = Axis(0, 1, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Where this process stands on every axis, and its device."""

    device: torch.device
    rank: int
    world_size: int
    pipeline: Axis
    data: Axis
    tensor: Axis
    world: Axis
    device_mesh: DeviceMesh
    shard: Axis  # the ranks of the data axis that share one sharded copy
    replica: Axis  # the ranks of the data axis that hold the same shard
    is_dry_run: bool
    owns_processes: bool  # start() made the process group, so stop() ends it
    message_timeout: timedelta = _LEAST_TIMEOUT
    reading: Stopwatch = field(default_factory=Stopwatch, compare=False)  # the rows of this rank


def start(
    *,
    pipeline: int,
    data: int,
    tensor: int,
    shard: int | None = None,
    timeout: float = 0.0,
) -> Mesh:
    """Join the processes that torchrun started and find this one's place in the mesh.

    `timeout` is how many seconds a step may take, and this start; messages have several times as
    long.
    """
    shard = data if shard is None else shard
    if data % shard:
        raise ValueError(f"{shard} ranks cannot share a sharded copy: the data axis has {data}")
    needed = pipeline * data * tensor
    message_timeout = max(_STEPS_OF_MESSAGE * timedelta(seconds=timeout), _LEAST_TIMEOUT)
    owns_processes = not dist.is_initialized()
    if owns_processes:
        _join(needed, _start_timeout(timeout))
    _check_world(dist.get_world_size(), needed)
    device = _device()
    sizes = {"pipeline": pipeline, "replica": data // shard, "shard": shard, "tensor": tensor}
    device_mesh = _device_mesh(device, sizes)
    if owns_processes:
        _set_timeouts(message_timeout)
        leave_with_others()
    axes = {name: _axis(device_mesh[name]) if size > 1 else ALONE for name, size in sizes.items()}
    return Mesh(
        device=device,
        rank=dist.get_rank(),
        world_size=needed,
        pipeline=axes["pipeline"],
        data=_data_axis(device_mesh, axes),
        tensor=axes["tensor"],
        world=_axis_of_group(dist.group.WORLD),
        device_mesh=device_mesh,
        shard=axes["shard"],
        replica=axes["replica"],
        is_dry_run=bool(os.environ.get(DRY_RUN)),
        owns_processes=owns_processes,
        message_timeout=message_timeout,
    )


def _start_timeout(seconds: float) -> timedelta:
    """Return how long the ranks of a start wait for each other: for the imports of all, too."""
    if not seconds:
        return default_pg_timeout
    return max(timedelta(seconds=seconds), _LEAST_START)


def _device_mesh(device: torch.device, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the axes of several ranks: each has a group, whose buffers take memory.

    An axis that all ranks are on has the group of the world. Copies want the shard axis beside
    theirs, however small; so does a process that has no other axis.
    """
    is_kept = {name: size > 1 for name, size in sizes.items()}
    is_kept["shard"] |= is_kept["replica"] or not any(is_kept.values())
    kept = {name: size for name, size in sizes.items() if is_kept[name]}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _set_timeouts(timeout: timedelta) -> None:
    """Give all groups their time: those of a device mesh have ten minutes under nccl."""
    if dist.get_backend() == "fake":
        return
    for group in dist.distributed_c10d._world.pg_map:
        _set_pg_timeout(timeout, group)


def _data_axis(device_mesh: DeviceMesh, axes: Mapping[str, Axis]) -> Axis:
    """Return the data axis; where each shard has one copy, or each copy one rank, it is that."""
    replica, shard = axes["replica"], axes["shard"]
    if replica.size > 1 and shard.size > 1:
        return _axis(device_mesh["replica", "shard"]._flatten("data"))
    return replica if replica.size > 1 else shard


def stop(mesh: Mesh) -> None:
    """Leave the processes, if start() joined them: all at once, and no thread of a group behind."""
    if mesh.owns_processes and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


def _device() -> torch.device:
    if not torch.cuda.is_available() or os.environ.get(DRY_RUN):
        return torch.device("cpu")
    processes, devices = number_in("LOCAL_WORLD_SIZE", default=1), torch.cuda.device_count()
    if processes > devices:
        refuse(
            f"{processes} processes have started on this machine, which has {devices} devices",
            fix=f"torchrun --nproc-per-node {devices} on each of more machines, or plan for fewer "
            f"devices: autopar plan --gpus {devices}",
        )
    device = torch.device("cuda", number_in("LOCAL_RANK", default=0))
    torch.cuda.set_device(device)
    return device


def _join(needed: int, timeout: timedelta) -> None:
    """Join under torchrun; without torchrun this process is the whole world."""
    if place := os.environ.get(DRY_RUN):
        _join_fake(place, needed)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()  # which is torchrun
    _check_world(number_in("WORLD_SIZE", default=1), needed)
    device = _device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    is_alone = "RANK" not in os.environ
    rank, size = number_in("RANK", default=0), 1 if is_alone else needed
    store = dist.HashStore() if is_alone else store_of(rank, size, timeout)  # type: ignore[attr-defined]
    hook = sys.excepthook
    with joining_nodes(store, size, timeout):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,  # connects now, not at first use
        )
    if hook is not sys.__excepthook__:  # torch has one around it, which names the rank in each line
        sys.excepthook = hook


def _join_fake(place: str, needed: int) -> None:
    """Stand at one place of a world of any size in which no message is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, _, world = place.partition("/")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise RuntimeError(f"{DRY_RUN} must read RANK/WORLD such as 0/{needed}, not {place!r}")
    _check_world(int(world), needed)
    dist.init_process_group("fake", rank=int(rank), world_size=int(world), store=FakeStore())


def _check_world(started: int, needed: int) -> None:
    if started != needed:
        refuse(
            f"this plan needs {needed} processes, and {started} started",
            fix=f"torchrun --nproc-per-node {needed} {sys.argv[0]} (on several nodes: their sum)",
        )


def _axis(mesh: DeviceMesh) -> Axis:
    return _axis_of_group(mesh.get_group())


def _axis_of_group(group: dist.ProcessGroup | None) -> Axis:
    size = dist.get_world_size(group)
    if size == 1:
        return ALONE
    return Axis(dist.get_rank(group), size, group, is_gloo=dist.get_backend(group) == "gloo")
