"""A loss that compares the rows of a batch with each other is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.findings.rows import meeting_rows
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.subjects import ZOO_MODELS, zoo_graph

PAIRS = Path(__file__).parents[2] / "field" / "models" / "pairs.py"


def test_the_product_of_all_pairs_of_rows_is_where_they_meet() -> None:
    met = meeting_rows(trace(load_model_file(str(PAIRS), [])))
    assert met is not None
    assert met.target.startswith("aten.m")


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_rows_of_the_zoo_do_not_meet(name: str) -> None:
    assert meeting_rows(zoo_graph(name)) is None


class Sharing(nn.Module):
    """Gives rows what all of them have made, in one way or another."""

    mean: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, scale_grad_by_freq=way == "counted")
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.BatchNorm1d(3)
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        match self.way:
            case "centered":
                x = x - x.mean(0)
            case "greatest":
                x = x / x.abs().amax(0, keepdim=True)
            case "rolled":
                x = x * x.roll(1, dims=0)
            case "next":
                x = x[1:] - x[:-1]
            case "first":
                x = x - x[0]
            case "ordered":  # and each compared with the one in its place
                x = x * x[x.sum((1, 2)).argsort()]
            case "counted down":
                x = x * x[torch.arange(x.shape[0] - 1, -1, -1)]
            case "along":
                x = x.softmax(dim=0)
            case "within":
                x = x.roll(1, dims=1).softmax(dim=1)[:, 1:].flip(-1)
            case "kept":
                with torch.no_grad():
                    self.mean.lerp_(x.mean((0, 1)), 0.1)
            case "normalised":
                x = functional.batch_norm(x, None, None, training=True)
            case "evaluated":
                x = functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=False)
            case "standardised":  # weights, of which every rank has the same
                weight = functional.batch_norm(self.embed.weight, None, None, training=True)
                x = functional.embedding(ids, weight)
            case "a norm":  # shares its statistics
                x = self.norm(x)
            case "counting":
                self.mean.add_(1)
            case "told":  # nothing is learnt of it, and yet it is another for a part
                x = x / x.detach().abs().amax()
            case "read":
                x = x * (ids - ids.double().mean()).unsqueeze(-1)
            case "weighed":  # by how often the batch has each class
                weight = torch.bincount(ids.flatten(), minlength=8).clamp(min=1).reciprocal()
                scores = x.flatten(0, 1).repeat(1, 2)
                return functional.cross_entropy(scores, ids.flatten(), weight)
            case "mixed":
                x = self.embed((ids + ids.flip(0)) % 8)
            case "divided":  # by their number, which is another for a part
                x = x / x.shape[0]
            case "divided once":  # a mean over rows, as sums are in many losses
                return torch.as_tensor(x.square().sum() / x.shape[0])
            case "made":  # of the rows' type alone
                x = x * x.new_ones(4).cumsum(0)
        loss: Tensor = x.square().mean()
        return loss


@pytest.mark.parametrize(
    ("way", "meet"),
    [
        *((way, True) for way in ("centered", "greatest", "counted", "rolled", "next", "first")),
        *(
            (way, True)
            for way in (
                "ordered",
                "counted down",
                "along",
                "kept",
                "normalised",
                "told",
                "read",
                "mixed",
                "weighed",
                "divided",
            )
        ),
        *((way, False) for way in ("counting", "within", "made", "divided once")),
        *((way, False) for way in ("evaluated", "standardised", "a norm")),
    ],
)
def test_what_all_rows_have_made_is_where_they_meet(way: str, *, meet: bool) -> None:
    file = replace(
        load_model_file(str(PAIRS), []),
        build_model=lambda: Sharing(way),
        example_batch=lambda rows: {"ids": torch.arange(3 * rows).reshape(rows, 3) % 8},
        loss=None,
    )
    assert (meeting_rows(trace(file)) is not None) == meet
