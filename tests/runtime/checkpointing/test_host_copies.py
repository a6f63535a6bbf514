"""Copies of a checkpoint take as much memory of the host as there is to copy, and take it once."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.checkpointing.safetensors_file import HostRoom, blocks_of, free_host_bytes

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def tensors(device: str = "cpu") -> list[torch.Tensor]:
    half = torch.ones((), dtype=torch.bfloat16)
    return [one.to(device) for one in (torch.randn(3, 5), torch.arange(7), half, torch.ones(0))]


@pytest.mark.parametrize("device", DEVICES)
def test_all_copies_lie_in_one_buffer_that_stays(device: str) -> None:
    room, own = HostRoom(), tensors(device)
    first = room.copied(own)
    assert all(torch.equal(one.cpu(), copy) for one, copy in zip(own, first, strict=True))
    assert len({one.untyped_storage().data_ptr() for one in first}) == 1
    assert first[0].untyped_storage().nbytes() < 4 * 64
    second = room.copied([one + 1 for one in own])
    assert second[0].data_ptr() == first[0].data_ptr()
    assert torch.equal(second[1], own[1].cpu() + 1)


def test_a_buffer_that_is_too_small_is_made_anew() -> None:
    room = HostRoom()
    room.copied(tensors())
    (large,) = room.copied([torch.ones(1000)])
    assert large.sum() == 1000


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_the_bytes_in_their_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.checkpointing.safetensors_file.BLOCK_BYTES", 4)
    flat = [torch.arange(n, n + 9, dtype=torch.uint8, device=device) for n in (0, 40, 80)]
    flat.insert(1, torch.arange(5, dtype=torch.uint8))
    found = b"".join(bytes(block) for block in blocks_of(flat))
    assert found == b"".join(bytes(one.tolist()) for one in flat)


def test_memory_that_is_left_is_known() -> None:
    free = free_host_bytes()
    assert free is None or free > 2**20
