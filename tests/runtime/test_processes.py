import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.runtime.processes import RankError, run_on_ranks


def _sum_of_ranks(start: float) -> float:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def _split_in_two_groups() -> int:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    return mesh["b"].size()


def _process() -> int:
    return os.getpid()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    _sum_of_ranks(0.0)


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    _sum_of_ranks(0.0)


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    _sum_of_ranks(0.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_come_back_in_the_order_of_the_ranks(size: int) -> None:
    assert run_on_ranks(dist.get_rank, size) == list(range(size))
    assert run_on_ranks(_sum_of_ranks, size, 1.0) == [size + sum(range(size))] * size


def test_processes_stay_from_call_to_call() -> None:
    first, second, third = (run_on_ranks(_process, 2) for _ in range(3))
    assert first == second or second == third  # once in a while all are renewed


def test_groups_made_by_one_call_are_gone_in_the_next() -> None:
    assert run_on_ranks(_split_in_two_groups, 4) == [2] * 4
    assert run_on_ranks(_split_in_two_groups, 4) == [2] * 4
    assert run_on_ranks(_sum_of_ranks, 4, 0.0) == [6.0] * 4


def test_a_failure_is_told_with_its_traceback_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*only here"):
        run_on_ranks(_fail_on_one, 2)
    assert run_on_ranks(_sum_of_ranks, 2, 0.0) == [1.0, 1.0]


def test_a_hang_ends_with_the_stacks_of_the_ranks() -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 0 hangs.*all_reduce.*rank 1 hangs.*_hang_on_one"
    ):
        run_on_ranks(_hang_on_one, 2, timeout_seconds=1.0)


def test_a_dead_rank_is_told_with_its_exit_code() -> None:
    told = r"rank 1 died with exit code 3|Connection (closed|reset) by peer"
    with pytest.raises(RankError, match=told):
        run_on_ranks(_die_on_one, 2)
