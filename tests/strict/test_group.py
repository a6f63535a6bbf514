"""The strict process group moves what gloo moves, late, and refuses what nccl refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks import transport
from autopar.runtime.ranks.mesh import start
from autopar.runtime.ranks.transport import ComingPart, ComingSum, started_gather
from tests.runtime.processes import LOG, run_on_ranks
from tests.strict.log import Issued, Waited
from tests.strict.refusals import RefusedError


def on_strict_ranks(function: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    return run_on_ranks(function, size, *args, backend="strict")


def test_every_transport_moves_what_gloo_moves() -> None:
    for strict, gloo in zip(
        on_strict_ranks(all_transports, size=4), run_on_ranks(all_transports, 4), strict=True
    ):
        assert strict.keys() == gloo.keys()
        for name, found in strict.items():
            assert torch.equal(found, gloo[name]), name


def all_transports() -> dict[str, Tensor]:
    axis = start(pipeline=1, data=1, tensor=4).tensor
    own = torch.arange(8.0) + 10 * axis.rank
    parts = [own[: n + axis.rank + 1] for n in range(4)]
    moved = transport.exchanged_pieces(parts, [(axis.rank + n + 1,) for n in range(4)], axis)
    gathered = torch.zeros(32)
    gathered[8 * axis.rank :][:8] = own
    work = started_gather(gathered, axis)
    assert work is not None
    work.wait()
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, axis.rank)
    return {
        "sum": transport.summed(own, axis),
        "gathered": transport.gathered(own, axis),
        "scattered": transport.sum_scattered(own.view(4, 2), axis),
        "exchanged": transport.exchanged(own.view(4, 2), axis),
        "pieces": torch.cat(moved),
        "in place": gathered,
        "coming sum": ComingSum(own.clone(), axis).value(),
        "coming part": ComingPart(own.clone(), axis).value(),
        "objects": torch.tensor(objects),
    }


def test_a_mean_divides_before_it_sums() -> None:
    first, second = on_strict_ranks(mean_of_large_numbers)
    assert first == second == 49_152.0


def mean_of_large_numbers() -> float:
    """Their sum fits in no fp16."""
    x = torch.tensor([57_344.0 if dist.get_rank() else 40_960.0], dtype=torch.float16)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.item()


def test_a_result_is_seen_after_it_was_waited_for() -> None:
    assert on_strict_ranks(unseen) == [(True, 3.0)] * 2


def unseen() -> tuple[bool, float]:
    x = torch.tensor([1.0 + dist.get_rank()])
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    before = bool(x.isnan())
    work.wait()
    return before, x.item()


@pytest.mark.parametrize("changes", ["what is sent", "what is received"])
def test_what_is_under_way_is_not_touched(changes: str) -> None:
    for told in on_strict_ranks(touched, changes):
        assert told == f"all_gather: {changes} was changed before wait()"


def touched(changes: str) -> str:
    mine, every = torch.ones(2), torch.zeros(4)
    work = dist.all_gather_into_tensor(every, mine, async_op=True)
    assert work is not None
    (mine if changes == "what is sent" else every).zero_()
    with pytest.raises(RefusedError) as refused:
        work.wait()
    return str(refused.value)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "int16": (lambda: torch.ones(2, dtype=torch.int16), "data type is not supported"),
    "strided": (lambda: torch.ones(2, 2).T, "must be contiguous"),
    "sparse": (
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (2,)),
        "must be on cpu and dense",
    ),
    "elsewhere": (lambda: torch.ones(2, device="meta"), "must be on cpu and dense"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_nccl_does_not_take_is_refused(kind: str) -> None:
    for told in on_strict_ranks(refused, kind):
        assert REFUSED[kind][1] in told


def refused(kind: str) -> str:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(RefusedError) as found:
        group.allreduce([REFUSED[kind][0]()])
    return str(found.value)


def test_a_batch_sends_both_ways_at_once() -> None:
    assert on_strict_ranks(swapped) == [([1.0], [0]), ([0.0], [0])]


def swapped() -> tuple[list[float], list[int | None]]:
    own, other = dist.get_rank(), 1 - dist.get_rank()
    found = torch.zeros(1)
    messages = [
        dist.P2POp(dist.isend, torch.tensor([float(own)]), other),
        dist.P2POp(dist.irecv, found, other),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    batches = {one.batch for one in LOG.events if isinstance(one, Issued)}
    return found.tolist(), list(batches)


def test_the_log_names_communicator_peer_and_bytes() -> None:
    for rank, events in enumerate(on_strict_ranks(one_message)):
        issued, waited = events
        assert (issued.op, issued.peer) == (("send", 1) if rank == 0 else ("recv", 0))
        assert (issued.size_bytes, issued.communicator.ranks) == (12, (0, 1))
        assert waited == Waited(number=issued.number)


def one_message() -> list[Any]:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.zeros(3), 0)
    return list(LOG.events)
