"""Who writes what: each element once, evenly, and found again under any other cut."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar.runtime.checkpointing.owners import (
    LocalPart,
    Owned,
    Owners,
    _RankShard,
    overlaps,
    shared_out,
)
from autopar.runtime.ranks.mesh import start
from autopar.runtime.tensor.shards import Chunks, whole
from tests.clock import least_seconds
from tests.runtime.processes import LOG
from tests.strict.log import Issued
from tests.strict.ranks import run_on_strict_ranks

SHAPE = (6, 8)
CUTS = [
    [whole(SHAPE)],
    [Chunks(SHAPE, (((0, 6),), ((0, 3), (6, 8)))), Chunks(SHAPE, (((0, 6),), ((3, 6),)))],
    [Chunks(SHAPE, (((0, 1),), ((0, 8),))), Chunks(SHAPE, (((1, 6),), ((0, 8),)))],
    [Chunks(SHAPE, ((), ((0, 8),))), whole(SHAPE)],
]


def _part(tensor: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    part = torch.zeros(chunks.local_shape, dtype=tensor.dtype)
    for target, source in overlaps(chunks.ranges, whole(SHAPE).ranges):
        part[target] = tensor[source]
    return part


@pytest.mark.parametrize(("one", "other"), list(product(CUTS, CUTS)))
def test_shards_of_one_cut_are_filled_from_those_of_another(
    one: list[Chunks], other: list[Chunks]
) -> None:
    tensor = torch.arange(48).view(SHAPE)
    for wanted in one:
        found = torch.full(wanted.local_shape, -1)
        for stored in other:
            for target, source in overlaps(wanted.ranges, stored.ranges):
                found[target] = _part(tensor, stored)[source]
        assert torch.equal(found, _part(tensor, wanted))


def _held(key: str, chunks: Chunks, *, is_buffer: bool = False) -> _RankShard:
    return _RankShard(key=key, dtype=torch.float32, chunks=chunks, is_buffer=is_buffer)


def _bytes_of(owned: tuple[Owned, ...], rank: int) -> int:
    return sum(one.chunks.elements * 4 for one in owned if one.rank == rank)


def test_copies_are_shared_out_evenly_and_buffers_are_of_one_rank() -> None:
    large, small = _held("a", whole((1000, 40))), [_held(f"b{n}", whole((9,))) for n in range(8)]
    buffer = _held("c", whole((3,)), is_buffer=True)
    owned = shared_out([[large, *small, buffer]] * 4)
    assert sum(one.chunks.elements for one in owned) == 40_000 + 8 * 9 + 3
    sizes = [_bytes_of(owned, rank) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 50
    assert [one.rank for one in owned if one.key == "c"] == [0]


def test_what_is_cut_is_written_by_who_holds_it() -> None:
    first, second = CUTS[1]
    owned = shared_out([[_held("a", first)], [_held("a", second)]])
    assert {(one.rank, one.chunks) for one in owned} == {(0, first), (1, second)}


RANKS = 256


def _large_model() -> list[_RankShard]:
    """Return what a rank holds of 48 layers of 1,600, with the states of their optimizer."""
    shapes = [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400), *[(1600,)] * 8]
    return [
        _held(f"{kind}/{layer}.{number}", whole(shape))
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for layer in range(48)
        for number, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("are_alike", [True, False])
def test_256_ranks_share_out_a_large_model_within_a_second(*, are_alike: bool) -> None:
    """Copies of a model, or parts of one copy."""
    every = _large_model()
    ranks = [every] * RANKS if are_alike else [every[n::RANKS] for n in range(RANKS)]
    owned = shared_out(ranks)
    assert least_seconds(lambda: shared_out(ranks), tries=1) < 1.0
    sizes = [0] * RANKS
    for one in owned:
        sizes[one.rank] += one.chunks.elements
    assert sum(sizes) == sum(one.chunks.elements for one in every)
    assert len(owned) < len(every) + 2 * 16 * RANKS
    if are_alike:
        assert max(sizes) < 1.1 * min(sizes)


def asked_again() -> tuple[list[str], list[str], list[str]]:
    """Return what three questions send: the first, one of the same, one of more on one rank."""
    mesh = start(pipeline=1, data=2, tensor=1)
    owners, sent = Owners(mesh), []
    held = [LocalPart(key="a", chunks=whole((2,)), tensor=torch.ones(2))]
    more = [LocalPart(key="b", chunks=whole((2,)), tensor=torch.ones(2))] if mesh.rank else []
    for local_tensors in (held, held, held + more):
        LOG.events.clear()
        keys = {one.key for one in owners.of(local_tensors)}
        sent.append([one.op for one in LOG.events if isinstance(one, Issued)])
    assert keys == {"a", "b"}
    first, second, third = sent
    return first, second, third


def test_ranks_ask_each_other_again_where_one_holds_something_else() -> None:
    for first, second, third in run_on_strict_ranks(asked_again, 2):
        assert second == ["all_reduce"]
        assert first == third == ["all_reduce", "all_gather", "all_gather"]
