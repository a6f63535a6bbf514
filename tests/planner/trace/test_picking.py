"""What a mask picks has as many entries as the mask has true ones, and no plan has that number."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.graph import Graph
from tests.planner.trace.model_source import line_of, linear_model, ops_of, traced


def graph_of(folder: Path, line: str) -> Graph:
    return traced(folder, linear_model("y, mask = self.linear(x), x[:, 0] > 0", line))


@pytest.mark.parametrize(
    "line",
    [
        "return y[mask] * 2",
        "return (y - x)[mask].square().flatten()",
        "return y[torch.where(mask)[0]] + 1",
        "return y[mask.nonzero().squeeze(1)] + 1",
        "return y.t().masked_select(mask) * 2",
        "return y[:, 0].masked_select(mask) + x[:, 1].masked_select(mask)",
    ],
)
def test_what_a_mask_picks_is_counted_by_it(tmp_path: Path, line: str) -> None:
    graph = graph_of(tmp_path, line)
    (mask,) = ops_of(graph, "gt")
    *_, last = (op for op in graph.ops if op.target.split(".")[1] in ("mul", "flatten", "add"))
    assert graph.tensors[last.outputs[0]].counted_by == mask.outputs[0]


@pytest.mark.parametrize(
    ("line", "maker"),
    [("return torch.cat([y, y[mask]])", "cat"), ("return y * x.unique().sum()", "_unique2")],
)
def test_other_numbers_of_entries_count_for_themselves(
    tmp_path: Path, line: str, maker: str
) -> None:
    graph = graph_of(tmp_path, line)
    (op,) = ops_of(graph, maker)
    assert graph.tensors[op.outputs[0]].counted_by in (op.name, op.outputs[0])


def test_what_is_put_back_has_its_size_from_the_batch(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "return torch.zeros_like(y).index_put((mask,), y[mask]) * 2")
    (doubled,) = ops_of(graph, "mul")
    assert not graph.tensors[doubled.outputs[0]].counted_by


@pytest.mark.parametrize(
    "line",
    [
        "return y[mask].sum() / y[mask].shape[0]",
        "return y[mask].sum() / y[mask].numel()",
        "return y[mask].sum() / max(mask.nonzero().shape[0], 1)",
    ],
)
def test_no_number_is_made_of_how_many_entries_a_mask_picks(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError) as told:
        graph_of(tmp_path, line)
    assert told.value.where.endswith(f"subject.py:{line_of(tmp_path / 'subject.py', line)}")
    assert "mask" in told.value.fix
