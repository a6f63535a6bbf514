"""The length of a tensor is its first size, which need not be a number while a model is traced."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from autopar.planner.graph.ops import BATCH
from tests.planner.trace.model_source import linear_model, ops_of, traced


def test_a_length_leaves_the_batch_open(tmp_path: Path) -> None:
    source = linear_model("return self.linear(x.view(len(x), 2, 2).transpose(1, 2).flatten(1))")
    assert traced(tmp_path, source).fixed_batch is None


def test_a_length_of_rows_is_so_many_times_the_batch(tmp_path: Path) -> None:
    source = linear_model("y = self.linear(torch.cat([x, x]))", "return y + torch.zeros(len(y), 1)")
    (made,) = ops_of(traced(tmp_path, source), "zeros")
    assert made.arguments[0][1] == (BATCH + BATCH, 1)


def test_what_is_no_tensor_has_its_own_length(tmp_path: Path) -> None:
    source = linear_model("return self.linear(x) * len([1, 2, 3]) * len(x[0])")
    assert [op.argument("other") for op in ops_of(traced(tmp_path, source), "mul")] == [3, 4]


def test_a_loop_over_the_rows_fixes_them_still(tmp_path: Path) -> None:
    source = linear_model("return torch.stack([self.linear(x[i]) for i in range(len(x))])")
    graph = traced(tmp_path, source)
    assert graph.fixed_batch is not None
    assert "subject.py" in graph.fixed_at


@pytest.mark.parametrize("number", ["x.shape[0] ** 0.5", "(1 / x.shape[0])"])
def test_a_number_that_is_no_polynomial_of_the_rows_fixes_them(tmp_path: Path, number: str) -> None:
    graph = traced(tmp_path, linear_model(f"return self.linear(x) * {number}"))
    (scaled,) = ops_of(graph, "mul")
    assert graph.fixed_batch is not None
    assert "subject.py" in graph.fixed_at
    rows = graph.fixed_batch
    assert scaled.argument("other") == pytest.approx(rows**0.5 if "**" in number else 1 / rows)


def test_python_has_its_length_back(tmp_path: Path) -> None:
    before = builtins.len
    traced(tmp_path, linear_model("return self.linear(x) * len(x)"))
    assert builtins.len is before
