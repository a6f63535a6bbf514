"""What a stage of a pipeline refuses by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.pipeline.stage import Shapes, Stage
from autopar.runtime.ranks.mesh import start


class Halves(nn.Module):
    """Every second number, so that of an odd length the larger half is left."""

    def forward(self, *, x: Tensor) -> Tensor:
        return x[:, ::2]


def half(batch: Mapping[str, Any]) -> Shapes:
    return Shapes(received=(), sent=(torch.Size((2, batch["x"].shape[1] // 2)),), lengths=())


def test_a_stage_that_gives_other_sizes_than_were_announced_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    sends = (torch.empty(2, 3, device="meta", requires_grad=True),)
    stage = Stage(Halves(), mesh, index=0, stages=2, receives=(), sends=sends, shapes=half)
    stage.take([{"x": torch.ones(2, 8)}, {"x": torch.ones(2, 7)}], [torch.ones(())] * 2)
    assert [tuple(one.shape) for one in stage.forward_one_chunk(0)] == [(2, 4)]
    with pytest.raises(SystemExit, match="6"):
        stage.forward_one_chunk(1)
    told = capsys.readouterr().err
    assert (
        "stage 1 makes [2, 4] of rows of this length, where its next stage expects [2, 3]" in told
    )
    assert "pad or cut rows" in told
