"""Messages of the late group arrive when they are waited for, and not before."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from autopar.runtime.ranks import transport
from autopar.runtime.ranks.mesh import start
from benchmarks.on_gpu.ranks.joining import joined_late
from tests.runtime.processes import run_on_ranks


def seen_without_waiting(store: str) -> tuple[bool, bool]:
    """Return whether a sum is there before it is waited for, and after."""
    with joined_late("cpu", store):
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        before = bool((x == 2).all())
        work.wait()
        return before, bool((x == 2).all())


def test_a_sum_is_not_there_before_it_is_waited_for(tmp_path: Path) -> None:
    assert run_on_ranks(seen_without_waiting, 2, str(tmp_path / "s")) == [(False, True)] * 2


def messages(store: str) -> list[list[float]]:
    """Return what each kind of message brings."""
    with joined_late("cpu", store):
        axis = start(pipeline=1, data=1, tensor=2).tensor
        x = torch.arange(4.0) + 10 * axis.rank
        mean = transport.ComingSum(x.clone(), axis, operation=dist.ReduceOp.AVG)
        other = torch.empty(4)
        swap = [
            dist.P2POp(dist.isend, x, 1 - axis.rank),
            dist.P2POp(dist.irecv, other, 1 - axis.rank),
        ]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        pieces = transport.exchanged_pieces(
            [x[: 1 + axis.rank], x[2:]],
            [(1 + axis.rank,), (2,)] if axis.rank == 0 else [(2,), (2,)],
            axis,
        )
        return [
            transport.gathered(x, axis).flatten().tolist(),
            transport.sum_scattered(x, axis).tolist(),
            transport.exchanged(x.view(2, 2), axis).flatten().tolist(),
            torch.cat(pieces).tolist(),
            mean.value().tolist(),
            other.tolist(),
        ]


def test_messages_bring_what_was_sent(tmp_path: Path) -> None:
    first, second = run_on_ranks(messages, 2, str(tmp_path / "s"))
    both = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert first[0] == second[0] == both
    assert (first[1], second[1]) == ([10.0, 12.0], [14.0, 16.0])
    assert (first[2], second[2]) == ([0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0])
    assert (first[3], second[3]) == ([0.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0])
    assert first[4] == second[4] == [5.0, 6.0, 7.0, 8.0]
    assert (first[5], second[5]) == (both[4:], both[:4])


def refusals(store: str) -> list[str]:
    """Return why tensors are not sent."""
    told = []
    unlike = (
        torch.ones(2, dtype=torch.int16),
        torch.ones(4, 4).t()[:2],
        torch.ones(2, device="meta"),
    )
    with joined_late("cpu", store):
        for tensor in unlike:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                told.append(str(error))
    return told


def test_what_nccl_does_not_take_is_refused(tmp_path: Path) -> None:
    (first, _) = run_on_ranks(refusals, 2, str(tmp_path / "s"))
    kind, gaps, device = first
    assert "int16" in kind
    assert "contiguous" in gaps
    assert "meta" in device


def gathered_objects(store: str) -> list[str | None]:
    """Return what the second rank is given of all."""
    with joined_late("cpu", store):
        rank = dist.get_rank()
        found: list[str | None] = [None, None]
        dist.gather_object("ab"[rank], found if rank == 1 else None, dst=1)
        return found


def test_objects_are_gathered_by_one_rank(tmp_path: Path) -> None:
    assert run_on_ranks(gathered_objects, 2, str(tmp_path / "s")) == [[None, None], ["a", "b"]]
