"""The device mesh: axes of ranks and their process groups.

Turns the degrees of a plan and the place of this process among the ranks into its mesh.

An axis belongs to the mesh, a dim to a tensor. The tensor axis varies fastest, so that its ranks
are neighbours on the fastest links. Next is the data axis; ranks that share one sharded copy are
neighbours. The pipeline axis varies slowest:

    rank = (pipeline · data_size + data) · tensor_size + tensor
    data = replica · shard_size + shard

With local steps (DiLoCo), the shard axis has the data ranks of one replica, even if they do not
share a sharded copy.
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
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.runtime.launchers import has_one_device
from autopar.runtime.ranks.leaving import (
    RUN_TOKEN,
    known_place,
    refuse,
    say,
    watch_for_leaving_ranks,
)
from autopar.runtime.ranks.network import joining_nodes, store_of

__all__ = ["Axis", "Mesh", "join_streams", "start", "stop"]  # for scripts

Item = TypeVar("Item")


class Stopwatch:
    """Adds up the seconds spent waiting for items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield items, and add up the time until each of them arrives."""
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
    """Make the kernel send SIGTERM to this process when its parent ends (Linux only).

    Otherwise the ranks of a killed torchrun would train on unnoticed.
    """
    if _prctl is not None:
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


_STDOUT, _STDERR = 1, 2


def join_streams() -> None:
    """Send stderr to stdout, in a rank that `autopar run` has started.

    torchrun has a log file for each stream and prints the new lines of each from time to time, so
    the lines of two streams would be out of order.
    """
    if RUN_TOKEN in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(_STDOUT, _STDERR)


# An environment variable: RANK/WORLD in a fake world, or RANK/WORLD/DEVICE to compute on a device.
DRY_RUN = "AUTOPAR_DRYRUN"
# The time limit of a message: this many times the limit of a step, and at least half an hour. The
# watch over steps (checkpointing/watch.py) knows more about a hang, so its limit should pass first.
_STEPS_OF_MESSAGE = 4
_LEAST_TIMEOUT = timedelta(minutes=30)
_LEAST_START = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as this process sees it; with size 1 it has no group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    is_gloo: bool = False  # gloo has no mean reduction


ALONE = Axis(0, 1, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The position of this process on every axis, and its device."""

    device: torch.device
    rank: int
    pipeline: Axis
    data: Axis
    tensor: Axis
    world: Axis
    device_mesh: DeviceMesh
    shard: Axis  # the data ranks that share one sharded copy, or one replica
    replica: Axis  # the data ranks that hold the same shard
    is_dry_run: bool
    owns_processes: bool  # whether start() made the process group, so that stop() must end it
    message_timeout: timedelta = _LEAST_TIMEOUT
    # local steps that replicas take between two outer steps; 0: no local steps
    sync_every: int = 0
    # time spent waiting for rows
    reading: Stopwatch = field(default_factory=Stopwatch, compare=False)

    @property
    def averaging(self) -> Axis:
        """The data ranks that average their gradients in every step."""
        return self.shard if self.sync_every else self.data

    def is_alike(self, step: int) -> bool:
        """Whether all replicas have the same parameters after a step that is not the last.

        With local steps they differ between two outer steps. The last step averages them.
        """
        return not self.sync_every or step % self.sync_every == 0

    def say(self, text: object, to: TextIO | None = None) -> None:
        """Print a line on the first rank alone."""
        if self.rank == 0:
            say(text, to)


def start(
    *,
    pipeline: int = 1,
    data: int = 1,
    tensor: int = 1,
    shard: int | None = None,
    sync_every: int = 0,
    timeout: float = 0.0,
) -> Mesh:
    """Join the processes that were started together; return the mesh as this process sees it.

    `sync_every` is the number of local steps between two outer steps.
    `timeout` is the limit in seconds for a step, and for the ranks to meet (at least a minute).
    The limit for a message is a multiple of it.
    """
    _let_segments_grow()
    shard = data if shard is None else shard
    if data % shard:
        raise ValueError(f"{shard} ranks cannot share a sharded copy: the data axis has {data}")
    needed = pipeline * data * tensor
    message_timeout = max(_STEPS_OF_MESSAGE * timedelta(seconds=timeout), _LEAST_TIMEOUT)
    owns_processes = not dist.is_initialized()
    if owns_processes:
        # how long to wait for the other ranks, which may still be importing modules
        is_set = timeout > 0
        patience = max(timedelta(seconds=timeout), _LEAST_START) if is_set else default_pg_timeout
        _join(needed, patience)
    _check_world(dist.get_world_size(), needed)
    device = _device()
    sizes = {"pipeline": pipeline, "replica": data // shard, "shard": shard, "tensor": tensor}
    device_mesh = _device_mesh(device, sizes)
    if owns_processes:
        _set_timeouts(message_timeout)
        watch_for_leaving_ranks()
    axes = {name: _axis(device_mesh[name]) if size > 1 else ALONE for name, size in sizes.items()}
    return Mesh(
        device=device,
        rank=dist.get_rank(),
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
        sync_every=sync_every,
    )


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _let_segments_grow() -> None:
    """Let CUDA's allocator grow its segments, unless the user has set up the allocator.

    Freed memory then serves tensors of other sizes: on a device that a plan nearly fills, there is
    no room for fragments.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def _device_mesh(device: torch.device, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a DeviceMesh of only the axes with several ranks: each group takes memory.

    An axis with all ranks uses the world's group. The shard axis is kept even at size 1 if there
    are replicas, or if no other axis is kept, because a mesh must have an axis.
    """
    is_kept = {name: size > 1 for name, size in sizes.items()}
    is_kept["shard"] |= is_kept["replica"] or not any(is_kept.values())
    kept = {name: size for name, size in sizes.items() if is_kept[name]}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all groups; nccl groups of a device mesh have ten minutes by default."""
    if dist.get_backend() == "fake":
        return
    module = dist.distributed_c10d
    set_timeout: Any = getattr(module, "set_timeout", module._set_pg_timeout)  # from torch 2.15 on
    for group in module._world.pg_map:
        set_timeout(timeout, group)


def _data_axis(device_mesh: DeviceMesh, axes: Mapping[str, Axis]) -> Axis:
    """Return the data axis, or the shard or replica axis if that has the same ranks."""
    replica, shard = axes["replica"], axes["shard"]
    if replica.size > 1 and shard.size > 1:
        return _axis(device_mesh["replica", "shard"]._flatten("data"))
    return replica if replica.size > 1 else shard


def stop(mesh: Mesh) -> None:
    """Destroy the process group that start() made, with its threads, on all ranks at once."""
    if mesh.owns_processes and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


def _device() -> torch.device:
    if place := os.environ.get(DRY_RUN):
        return torch.device("".join(place.split("/")[2:]) or "cpu")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own, devices = known_place(), torch.cuda.device_count()
    processes, index = own.local_world_size, own.local_rank
    if devices == 1 and has_one_device(own, os.environ):
        index = 0
    elif processes > devices:
        refuse(
            f"{processes} processes have started on this machine, which has {devices} devices",
            fix=f"torchrun --nproc-per-node {devices} on each of more machines, or plan for fewer "
            f"devices: autopar plan --gpus {devices}",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _join(needed: int, timeout: timedelta) -> None:
    """Join the process group; without a launcher this process is the whole world."""
    if place := os.environ.get(DRY_RUN):
        _join_fake(place, needed)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()  # the parent is torchrun
    own = known_place()
    _check_world(own.world_size, needed)
    device = _device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    is_alone = own.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    store = dist.HashStore() if is_alone else store_of(own, timeout)  # type: ignore[attr-defined]
    hook = sys.excepthook
    with joining_nodes(store, own, timeout):
        dist.init_process_group(
            backend,
            store=store,
            rank=own.rank,
            world_size=own.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,  # connect now, not at first use
        )
    if hook is not sys.__excepthook__:  # torch wraps it to print the rank in each line
        sys.excepthook = hook


def _join_fake(place: str, needed: int) -> None:
    """Take a place in a fake world of any size, in which no message is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, world, *_ = (*place.split("/"), "", "")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise RuntimeError(f"{DRY_RUN} must read RANK/WORLD such as 0/{needed}, not {place!r}")
    _check_world(int(world), needed)
    dist.init_process_group("fake", rank=int(rank), world_size=int(world), store=FakeStore())


def _check_world(started: int, needed: int) -> None:
    if started != needed:
        command = known_place().launcher.start.replace("COUNT", str(needed))
        refuse(
            f"this plan needs {needed} processes, and {started} started",
            fix=f"{command} {sys.argv[0]} (on several nodes: all together)",
        )


def _axis(mesh: DeviceMesh) -> Axis:
    return _axis_of_group(mesh.get_group())


def _axis_of_group(group: dist.ProcessGroup | None) -> Axis:
    size = dist.get_world_size(group)
    if size == 1:
        return ALONE
    return Axis(dist.get_rank(group), size, group, is_gloo=dist.get_backend(group) == "gloo")
