"""What is computed twice stands once in printed code, unless someone writes to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.codegen.forward.reading.test_author_names import printed


class Masked(nn.Module):
    """Counts its positions for each of two masks, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.out(ids.float()).unsqueeze(-1) * torch.ones(4)
        for window in (1, 2):
            rows = torch.arange(4, device=ids.device).unsqueeze(1)
            columns = torch.arange(4, device=ids.device).unsqueeze(0)
            scores = scores.masked_fill(columns > rows + window, 0.0)
        return scores.square().mean()


class Writing(nn.Module):
    """Makes two tensors alike, and writes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        marked, plain = torch.zeros(4), torch.zeros(4)
        marked[1] = 1.0
        out: Tensor = self.out(ids.float())
        return (out * (marked + 2 * plain)).square().mean()


class Learning(nn.Module):
    """Computes with a weight twice, whose gradient counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.out.weight.exp() * self.out.weight.exp() + ids.sum()).mean()


def test_positions_are_counted_once() -> None:
    (source,) = printed(Masked(), opened=[""]).values()
    assert source.count("torch.arange") == 1
    assert source.count("masked_fill") == 2


def test_what_is_written_to_is_made_anew() -> None:
    (source,) = printed(Writing(), opened=[""]).values()
    assert source.count("torch.zeros") == 2


def test_what_learns_is_computed_as_it_was() -> None:
    (source,) = printed(Learning(), opened=[""]).values()
    assert source.count("exp()") == 2
