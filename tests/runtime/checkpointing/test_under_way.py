"""What torch's recorder has of messages under way, of real ones."""

from __future__ import annotations

from time import monotonic, sleep

import torch
import torch.distributed as dist

from autopar.runtime.checkpointing.watch import UnderWay, not_begun, under_way
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import Pool

SECOND = "all_reduce 2 of the tensor axis"


def one_is_late() -> UnderWay:
    """Have the first rank begin what the other has not; return what this one has begun."""
    mesh = start(pipeline=1, data=2, tensor=2)
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.tensor.group)
    dist.barrier()
    if mesh.tensor.rank == 0:
        work = dist.all_reduce(value, group=mesh.tensor.group, async_op=True)
    found = settled(has_begun=mesh.tensor.rank == 0)
    dist.barrier()
    if mesh.tensor.rank == 1:
        work = dist.all_reduce(value, group=mesh.tensor.group, async_op=True)
    assert work is not None
    work.wait()
    return found


def settled(*, has_begun: bool) -> UnderWay:
    """Return what is under way; torch notes beginnings and ends a moment later."""
    wanted = SECOND if has_begun else None
    until = monotonic() + 10.0
    found = under_way()
    while (found.waits_for and found.waits_for.description) != wanted and monotonic() < until:
        sleep(0.01)
        found = under_way()
    return found


def test_the_collective_that_one_rank_has_not_begun_is_named() -> None:
    pool = Pool(4)  # of new processes: the recorder of others still has messages of other tests
    try:
        found = pool.run(one_is_late, (), 60.0)
    finally:
        pool.kill()
    assert not_begun(dict(enumerate(found))) == {1: SECOND, 3: SECOND}
