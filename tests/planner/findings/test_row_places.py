"""A result that depends on a row's place in the batch, or on rows beside it, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.findings.rows import meeting_rows, use_of_places
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace

PAIRS = Path(__file__).parents[2] / "field" / "models" / "pairs.py"
TOKENS, WIDTH = 6, 8


class Parts(nn.Module):
    """The layers that the forwards below use; each row is 6 × 8."""

    def __init__(self, way: Callable[[Parts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(64, TOKENS, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.bag = nn.EmbeddingBag(9, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        loss: Tensor = self.way(self, self.first(x), ends).square().mean()
        return loss


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


COUNTING = {
    "a factor": lambda _, x, __: x * places(x)[:, None, None],
    "every second row": lambda _, x, __: torch.where((places(x) % 3 == 0)[:, None, None], x, -x),
    "a code": lambda _, x, __: x * functional.one_hot(places(x) % 3, TOKENS)[:, :, None],
    "a table": lambda model, x, _: x + model.table[places(x)],
    "a grid": lambda _, x, __: x * torch.arange(len(x) * TOKENS).view(-1, TOKENS, 1),
    "an identity": lambda _, x, __: x * torch.eye(len(x), TOKENS)[:, :, None],
    "a row by number": lambda _, x, ends: x * x[ends],
    "the first of a flat batch": lambda _, x, __: x.flatten(0, 1)[places(x)],
}
ALONG = {
    "a triangle": lambda _, x, __: x * x.new_ones(len(x), TOKENS).tril()[:, :, None],
    "a part of a table": lambda model, x, _: x + model.table[: len(x)],
    "attention whose rows come second": lambda model, x, _: model.attention(
        x, x, x, need_weights=False
    )[0],
    "a layer whose rows come second": lambda model, x, _: model.layer(x),
    "a convolution": lambda model, x, _: model.filter(x.permute(1, 2, 0)),
    "a shift": lambda _, x, __: x * functional.pad(x, (0, 0, 0, 0, 1, -1)),
    "tokens of the row before": lambda _, x, __: x.flatten(0, 1)[1:] * x.flatten(0, 1)[:-1],
    "a spectrum": lambda _, x, __: torch.fft.fft(x, dim=0).real,
    "the greatest so far": lambda _, x, __: x.cummax(0)[0],
    "statistics": lambda _, x, __: functional.group_norm(x.permute(1, 2, 0), 2),
    "a view for a transpose": lambda _, x, __: x.view(TOKENS, len(x), WIDTH)[2:],
    "two orders": lambda _, x, __: x.repeat(2, 1, 1) * x.repeat_interleave(2, 0),
    "numbers in another order": lambda _, x, __: (
        turned(x).flatten(0, 1) * torch.arange(6.0).repeat(len(x))[:, None]
    ),
    "products added up": lambda _, x, __: torch.einsum("btd,cte->bde", x, x),
    "a tensor of their number": lambda _, x, __: x * torch.tensor(len(x)),
    "norms of columns": lambda _, x, __: x.renorm(2, -1, 1.0),
    "strides of the first row": lambda _, x, __: x + x.as_strided(x.shape, (0, WIDTH, 1)),
    "strides into the next row": lambda _, x, __: x.as_strided(x.shape, x.stride(), 1),
}
APART = {
    "the last token": lambda _, x, ends: x[places(x), ends],
    "the last of a flat batch": lambda _, x, ends: x.flatten(0, 1)[places(x) * TOKENS + ends],
    "tokens counted in a row": lambda _, x, __: (
        x * (torch.arange(len(x) * TOKENS) % TOKENS).view(-1, TOKENS, 1)
    ),
    "a mask of lengths": lambda _, x, ends: x * (torch.arange(TOKENS) < ends[:, None])[:, :, None],
    "attention over tokens": lambda model, x, _: model.layer(turned(x)),
    "two halves": lambda _, x, __: torch.cat([x, -x])[: len(x)] + torch.cat([x, -x])[len(x) :],
    "halves apart": lambda _, x, __: torch.cat([x, x.tanh()]).view(2, -1, TOKENS, WIDTH).prod(0),
    "bags": lambda model, _, ends: model.bag(ends[:, None] + torch.arange(2)),
    "norms of rows": lambda _, x, __: x.renorm(2, 0, 1.0),
    "windows of a row": lambda _, x, __: x.as_strided(
        (len(x), 4, 3, WIDTH), (TOKENS * WIDTH, WIDTH, WIDTH, 1)
    ),
}


def traced(way: Callable[[Parts, Tensor, Tensor], Tensor]) -> Graph:
    def example_batch(rows: int) -> dict[str, Tensor]:
        return {"x": torch.randn(rows, TOKENS, WIDTH), "ends": torch.randint(0, 6, (rows,))}

    file = load_model_file(str(PAIRS))
    return trace(
        replace(file, build_model=lambda: Parts(way), example_batch=example_batch, loss=None)
    )


@pytest.mark.parametrize("way", COUNTING)
def test_a_place_in_the_batch_is_noticed(way: str) -> None:
    graph = traced(COUNTING[way])
    met = meeting_rows(graph)
    assert met is not None
    assert use_of_places(met, graph)


@pytest.mark.parametrize("way", ALONG)
def test_work_along_the_rows_is_noticed(way: str) -> None:
    assert meeting_rows(traced(ALONG[way])) is not None


@pytest.mark.parametrize("way", APART)
def test_rows_that_find_themselves_are_apart(way: str) -> None:
    assert meeting_rows(traced(APART[way])) is None
