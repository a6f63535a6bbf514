"""Rows that masks divide among experts are priced once in all, each expert with its even share."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.annotate import annotate
from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.precision import Precision
from tests.planner.trace.model_source import ops_of, traced

EXPERTS = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 6, bias=False)
            self.experts = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(6))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            hot = F.one_hot(chosen, 6).permute(2, 1, 0)
            made = x.new_zeros(x.shape[0], 8)
            for number, expert in enumerate(self.experts):
                {body}
            return made

    def build_model():
        return Model()
"""
WAYS = {
    "each choice": """rows, slot = torch.where(chosen == number)
                made = made.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])""",
    "any choice": """rows = (chosen == number).any(-1)
                made = made.index_put((rows,), made[rows] + expert(x[rows]))""",
    "one hot": """slot, rows = torch.where(hot[number])
                made = made.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])""",
}
ROWS = 12


def graph_of(folder: Path, body: str) -> Graph:
    return traced(folder, EXPERTS.format(body=body))


@pytest.mark.parametrize("way", WAYS)
def test_each_expert_is_priced_with_its_share(tmp_path: Path, way: str) -> None:
    graph = graph_of(tmp_path, WAYS[way])
    done = annotate(graph, infer_axes(graph), batch=ROWS, precision=Precision.FP32)
    gate, *experts = ops_of(graph, "linear")
    # the gate 2·12·4·6; experts 2·(2·12)·4·8 in all: two choices of each of 12 rows, among six
    assert done[gate.name].forward_flops == 576
    assert [done[op.name].forward_flops for op in experts] == [1536 // 6] * 6
    assert [done[op.name].backward_flops for op in experts] == [1536 // 6] * 6


def test_masks_that_do_not_part_the_rows_may_pick_all(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "made = made + expert(x[weights[:, 0] > number]).sum(0)")
    done = annotate(graph, infer_axes(graph), batch=ROWS, precision=Precision.FP32)
    _, *experts = ops_of(graph, "linear")
    assert [done[op.name].forward_flops for op in experts] == [2 * ROWS * 4 * 8] * 6


def test_a_mask_of_one_number_alone_may_pick_all(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "made = made + expert(x[chosen[:, 0] == 0]).sum(0) * weights.sum()")
    done = annotate(graph, infer_axes(graph), batch=ROWS, precision=Precision.FP32)
    _, *experts = ops_of(graph, "linear")
    assert [done[op.name].forward_flops for op in experts] == [2 * ROWS * 4 * 8] * 6
