"""Turns the degrees of a plan and torchrun's environment into the mesh of this process.

An axis belongs to the mesh, a dim to a tensor. The tensor axis is the fastest, so that its ranks
are neighbours on the quickest links; then data, whose ranks that share one sharded copy are
neighbours; the pipeline axis is the slowest:

    rank = (pipeline · data_size + data) · tensor_size + tensor
    data = replica · shard_size + shard
"""

import gc
import os
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.runtime.ranks.parent import stop_with_parent
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.rendezvous import store_of
from autopar.runtime.ranks.stopwatch import Stopwatch

DRY_RUN = "AUTOPAR_DRYRUN"


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
    reading: Stopwatch = field(default_factory=Stopwatch, compare=False)  # the rows of this rank


def start(*, pipeline: int, data: int, tensor: int, shard: int | None = None) -> Mesh:
    """Join the processes that torchrun started and find this one's place in the mesh."""
    shard = data if shard is None else shard
    if data % shard:
        raise ValueError(f"{shard} ranks cannot share a sharded copy: the data axis has {data}")
    needed = pipeline * data * tensor
    dry_run = os.environ.get(DRY_RUN)
    owns_processes = not dist.is_initialized()
    if owns_processes and dry_run:
        _join_fake(dry_run, needed)
    elif owns_processes:
        _join(needed)
    _check_world(dist.get_world_size(), needed)
    device = _device()
    names = ("pipeline", "replica", "shard", "tensor")
    device_mesh = init_device_mesh(
        device.type, (pipeline, data // shard, shard, tensor), mesh_dim_names=names
    )
    return Mesh(
        device=device,
        rank=dist.get_rank(),
        world_size=needed,
        pipeline=_axis(device_mesh["pipeline"]),
        data=_axis(device_mesh["replica", "shard"]._flatten("data")),
        tensor=_axis(device_mesh["tensor"]),
        world=_axis_of_group(dist.group.WORLD),
        device_mesh=device_mesh,
        shard=_axis(device_mesh["shard"]),
        replica=_axis(device_mesh["replica"]),
        is_dry_run=bool(dry_run),
        owns_processes=owns_processes,
    )


def stop(mesh: Mesh) -> None:
    """Leave the processes, if start() joined them: all at once, and no thread of a group behind."""
    if mesh.owns_processes and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


def _device() -> torch.device:
    if not torch.cuda.is_available() or os.environ.get(DRY_RUN):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(needed: int) -> None:
    """Join under torchrun; without torchrun this process is the whole world."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()  # which is torchrun
    _check_world(int(os.environ.get("WORLD_SIZE", "1")), needed)
    device = _device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None  # connects at once, not at first use
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            backend, store=store_of(rank, needed), rank=rank, world_size=needed, device_id=device_id
        )
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)


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
