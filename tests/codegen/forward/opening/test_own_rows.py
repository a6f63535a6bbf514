"""A rank is given its rows of what it uses in shares alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import SplitGraph, split_graph, with_own_rows
from autopar.planner.graph.layouts import REPLICATED, OpLayout, split
from autopar.planner.rules.signature import leaves
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of


class Compared(nn.Module):
    """Holds what one tensor says against another."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.head(x), y)


def batch_of(rows: int) -> Mapping[str, Tensor]:
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows, 2)}


def split_by_rows(rows: int) -> SplitGraph:
    """Return a graph whose linear layer is split by rows over two ranks, and nothing else."""
    graph = trace(replace(file_of(Compared), example_batch=batch_of))
    plain = split_graph(graph, modules_of(Compared()))
    (linear,) = (op for op in graph.ops if op.target == "aten.linear.default")
    axis, *_ = leaves(plain.axes.dims[linear.outputs[0]][0])
    part = split(axis.name, 0)
    layout = OpLayout(
        letter="…", axis=axis.name, needs=(part, REPLICATED, REPLICATED), gives=(part,)
    )
    return replace(
        plain,
        degree=2,
        batch=rows,
        ops=MappingProxyType({linear.name: layout}),
        gives=MappingProxyType({linear.outputs[0]: part}),
    )


def test_a_rank_is_given_its_rows_of_what_is_split_wherever_it_is_used() -> None:
    found = with_own_rows(split_by_rows(4))
    assert found.own_rows == ("x",)
    assert found.made("x").dim == 0
    assert found.made("x").axis in found.row_axes
    assert not found.made("y").axis


def test_ranks_of_which_some_would_have_no_rows_are_given_all() -> None:
    assert with_own_rows(split_by_rows(1)).own_rows == ()
