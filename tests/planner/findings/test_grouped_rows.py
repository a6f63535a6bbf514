"""Rows that are sorted by their group and brought back do not meet; what else is sorted does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.findings.rows import meeting_rows
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of

EXPERTS = 3


class Experts(nn.Module):
    """Multiplies each token by the matrix of its expert, and puts it back in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.router = nn.Linear(4, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, 4, 4))
        self.scale = nn.Parameter(torch.ones(EXPERTS))
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        scores = self.router(x)
        chosen = scores.argmax(-1)
        keys, places = (scores[:, 0] if self.way == "by numbers" else chosen).sort()
        if self.way == "by numbers":
            keys = chosen[places]
        counts = torch.histc(keys.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x[places]
        if self.way == "unsorted":
            rows = rows + x
        if self.way == "by position":
            starts = functional.pad(ends[:-1], (1, 0))
            within = torch.arange(keys.shape[0], device=ids.device) - starts[keys]
            rows = rows * (within < 3).unsqueeze(-1)
        if self.way == "the one before":
            rows = rows + rows.roll(1, dims=0)
        made = functional.grouped_mm(rows, self.matrices, offs=ends)
        made = made * self.scale[keys].unsqueeze(-1)
        match self.way:
            case "added":
                made = torch.zeros_like(x).index_add(0, places, made)
            case "sorted again":
                made = made[places.argsort()]
            case "left as it lies":
                made = made + x
            case _:
                back = torch.empty_like(places)
                back[places] = torch.arange(places.shape[0], device=ids.device)
                made = made[back]
        out: Tensor = (made * x).square().mean()
        return out


@pytest.mark.parametrize(
    ("way", "meets"),
    [
        ("written", False),
        ("added", False),
        ("sorted again", False),
        ("by numbers", True),
        ("unsorted", True),
        ("by position", True),
        ("the one before", True),
        ("left as it lies", True),
    ],
)
def test_rows_meet_where_what_is_sorted_meets_what_is_not(way: str, meets: bool) -> None:
    graph = trace(file_of(lambda: Experts(way)))
    assert (meeting_rows(graph) is not None) == meets
