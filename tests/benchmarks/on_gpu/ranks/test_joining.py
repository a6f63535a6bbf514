"""Processes of one machine share a device, which scripts do not let them do."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.ranks import mesh
from benchmarks.on_gpu.ranks.joining import share_device


def test_a_second_process_takes_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(mesh, "_device", mesh._device)  # which is put back behind this test
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    share_device()
    assert mesh._device() == torch.device("cuda", 0)
    assert taken == [0]
