"""Who writes what: each element once, evenly, and found again under any other cut."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar.runtime.keeping.overlaps import overlaps
from autopar.runtime.keeping.owners import Owned, _Held, shared_out
from autopar.runtime.tensor.chunks import Chunks, whole

SHAPE = (6, 8)
CUTS = [
    [whole(SHAPE)],
    [Chunks(SHAPE, (((0, 6),), ((0, 3), (6, 8)))), Chunks(SHAPE, (((0, 6),), ((3, 6),)))],
    [Chunks(SHAPE, (((0, 1),), ((0, 8),))), Chunks(SHAPE, (((1, 6),), ((0, 8),)))],
    [Chunks(SHAPE, ((), ((0, 8),))), whole(SHAPE)],
]


def _part(tensor: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    part = torch.zeros(chunks.local_shape, dtype=tensor.dtype)
    for target, source in overlaps(chunks, whole(SHAPE)):
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
            for target, source in overlaps(wanted, stored):
                found[target] = _part(tensor, stored)[source]
        assert torch.equal(found, _part(tensor, wanted))


def _held(key: str, chunks: Chunks, *, is_buffer: bool = False) -> _Held:
    return _Held(key=key, dtype=torch.float32, chunks=chunks, is_buffer=is_buffer)


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
