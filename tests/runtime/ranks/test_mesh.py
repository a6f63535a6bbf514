import io
import os
from contextlib import redirect_stderr
from datetime import timedelta
from socket import socket
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.ranks.mesh import DRY_RUN, Mesh, start, stop
from tests.runtime.processes import run_on_ranks


def _places(pipeline: int, data: int, tensor: int, shard: int) -> tuple[int, ...]:
    mesh = start(pipeline=pipeline, data=data, tensor=tensor, shard=shard)
    axes = (mesh.pipeline, mesh.replica, mesh.shard, mesh.tensor, mesh.data)
    assert mesh.device == torch.device("cpu")
    stop(mesh)
    assert dist.is_initialized()  # the test made the processes, so they stay
    return tuple(axis.rank for axis in axes)


def test_tensor_is_the_fastest_axis_and_pipeline_the_slowest() -> None:
    places = run_on_ranks(_places, 8, 2, 2, 2, 2)
    expected = [(p, 0, d, t, d) for p in range(2) for d in range(2) for t in range(2)]
    assert places == expected


def test_ranks_that_share_a_sharded_copy_are_neighbours_on_the_data_axis() -> None:
    places = run_on_ranks(_places, 4, 1, 4, 1, 2)
    assert places == [(0, 0, 0, 0, 0), (0, 0, 1, 0, 1), (0, 1, 0, 0, 2), (0, 1, 1, 0, 3)]


def _sum_along_axes() -> tuple[float, ...]:
    mesh = start(pipeline=1, data=2, tensor=2)
    sums = []
    for axis in (mesh.tensor, mesh.data, mesh.world):
        value = torch.tensor(float(mesh.rank))
        dist.all_reduce(value, group=axis.group)
        sums.append(value.item())
    return tuple(sums)


def test_every_axis_has_its_own_group() -> None:
    sums = run_on_ranks(_sum_along_axes, 4)
    assert sums == [(1, 2, 6), (1, 4, 6), (5, 2, 6), (5, 4, 6)]


def _timeouts_of_groups(port: int) -> set[timedelta]:
    """Join anew, as under torchrun, and return the time that messages of each group have."""
    dist.destroy_process_group()
    with patch.dict(os.environ, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}):
        mesh = start(pipeline=2, data=2, tensor=1, timeout=7200)
    groups = dist.distributed_c10d._world.pg_map
    found: set[timedelta] = {group._get_backend(mesh.device).options._timeout for group in groups}
    assert len(groups) == 3
    stop(mesh)
    return found


def test_messages_of_all_groups_have_longer_than_a_step() -> None:
    with socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert run_on_ranks(_timeouts_of_groups, 4, port) == [{timedelta(hours=8)}] * 4


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", DRY_RUN):
        monkeypatch.delenv(name, raising=False)


def _start_too_large() -> str:
    told = io.StringIO()
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        start(pipeline=2, data=2, tensor=2)
    return told.getvalue()


def test_a_wrong_number_of_processes_is_told_with_the_right_command() -> None:
    text = run_on_ranks(_start_too_large, 2)[0]
    assert "this plan needs 8 processes, and 2 started" in text
    assert "--nproc-per-node 8" in text


@pytest.mark.usefixtures("no_torchrun")
def test_more_processes_than_devices_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="6"):
        start(pipeline=1, data=1, tensor=1)
    told = capsys.readouterr().err
    assert "4 processes have started on this machine, which has 2 devices" in told


def test_a_shard_count_that_does_not_divide_the_data_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share"):
        start(pipeline=1, data=4, tensor=1, shard=3)


@pytest.mark.usefixtures("no_torchrun")
def test_one_process_needs_no_torchrun() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    assert (mesh.rank, mesh.world.size, mesh.tensor.group, mesh.world.group) == (0, 1, None, None)
    stop(mesh)
    assert not dist.is_initialized()


def _dry(place: str) -> Mesh:
    os.environ[DRY_RUN] = place
    try:
        return start(pipeline=4, data=32, tensor=8)
    finally:
        del os.environ[DRY_RUN]


@pytest.mark.usefixtures("no_torchrun")
def test_a_dry_run_stands_at_one_place_of_a_large_world() -> None:
    mesh = _dry("523/1024")
    assert (mesh.pipeline.rank, mesh.data.rank, mesh.tensor.rank) == (2, 1, 3)
    assert mesh.is_dry_run
    dist.all_reduce(torch.ones(2), group=mesh.tensor.group)  # returns at once
    stop(mesh)


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize("place", ["1024/1024", "3", "a/b"])
def test_a_dry_run_needs_a_rank_and_a_world(place: str) -> None:
    with pytest.raises(RuntimeError, match="RANK/WORLD"):
        _dry(place)


def _allocator(own: dict[str, str]) -> dict[str, str]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    with patch.dict(os.environ, own):
        for name in set(names) - own.keys():
            os.environ.pop(name, None)
        stop(start())
        return {name: os.environ[name] for name in names if name in os.environ}


def test_segments_grow_unless_the_user_has_set_up_the_allocator() -> None:
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert run_on_ranks(_allocator, 1, {}) == [{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]
    assert run_on_ranks(_allocator, 1, own) == [own]
