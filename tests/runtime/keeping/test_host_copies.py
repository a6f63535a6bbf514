"""Copies of a checkpoint take as much memory of the host as there is to copy, and take it once."""

from __future__ import annotations

import torch

from autopar.runtime.keeping.host_copies import Room, blocks_of, free_host_bytes


def tensors() -> list[torch.Tensor]:
    return [torch.randn(3, 5), torch.arange(7), torch.ones((), dtype=torch.bfloat16), torch.ones(0)]


def test_all_copies_lie_in_one_buffer_that_stays() -> None:
    room, own = Room(), tensors()
    first = room.copied(own)
    assert all(torch.equal(one, copy) for one, copy in zip(own, first, strict=True))
    assert len({one.untyped_storage().data_ptr() for one in first}) == 1
    assert first[0].untyped_storage().nbytes() < 4 * 64
    second = room.copied([one + 1 for one in own])
    assert second[0].data_ptr() == first[0].data_ptr()
    assert torch.equal(second[1], own[1] + 1)


def test_a_buffer_that_is_too_small_is_made_anew() -> None:
    room = Room()
    room.copied(tensors())
    (large,) = room.copied([torch.ones(1000)])
    assert large.sum() == 1000


def test_blocks_are_the_bytes_in_their_order() -> None:
    flat = [torch.arange(n, n + 9, dtype=torch.uint8) for n in (0, 40, 80)]
    assert b"".join(blocks_of(flat)) == b"".join(bytes(one.tolist()) for one in flat)


def test_memory_that_is_left_is_known() -> None:
    free = free_host_bytes()
    assert free is None or free > 2**20
