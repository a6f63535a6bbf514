"""What is written into a part of a tensor reaches whoever reads the tensor, gradients included."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.graph.graph import Graph
from tests.planner.trace.model_source import linear_model, ops_of, traced


def graph_of(folder: Path, *lines: str) -> Graph:
    return traced(folder, linear_model(*lines))


def test_a_write_into_a_slice_makes_a_new_tensor(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "out = x.new_zeros(x.shape)",
        "out[:, 1:] = self.linear(x)[:, 1:]",
        "return out * 2",
    )
    (scatter,) = ops_of(graph, "slice_scatter")
    (doubled,) = ops_of(graph, "mul")
    assert doubled.inputs == scatter.outputs
    assert graph.tensors[doubled.outputs[0]].requires_grad
    assert not any(op.writes for op in graph.ops)


def test_a_number_that_is_written_fills_the_slice(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "y = self.linear(x) + 0", "y[:, 0] = x[0, 0]", "return y")
    (scatter,) = ops_of(graph, "select_scatter")
    source = scatter.inputs[1]
    assert graph.tensors[source].shape == graph.tensors[scatter.outputs[0]].shape[:1]


def test_complex_numbers_are_written_where_they_are(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "seen = torch.fft.rfft(self.linear(x))",
        "out = torch.zeros_like(seen)",
        "out[:, :2] = seen[:, :2] * 2",
        "return torch.fft.irfft(out, n=4)",
    )
    assert not ops_of(graph, "slice_scatter"), "of which torch has no gradient"
    assert any(op.writes for op in graph.ops)


def test_writes_follow_each_other(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "y, out = self.linear(x), x.new_zeros(x.shape)",
        "out[:, :2] = y[:, 2:]",
        "out[:, 2:] = y[:, :2]",
        "return out",
    )
    first, second = ops_of(graph, "slice_scatter")
    (seen,) = (op for op in graph.ops if op.outputs == second.inputs[:1])  # out[:] of out[:, 2:]
    assert seen.inputs == first.outputs


def test_a_view_from_before_the_write_keeps_it_in_place(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "out = x.new_zeros(x.shape)",
        "early = out[:, :3]",
        "out[:, 1:] = self.linear(x)[:, 1:]",
        "return out[:, :3] + early",
    )
    assert not ops_of(graph, "slice_scatter")
    assert ops_of(graph, "copy_")
    (total,) = ops_of(graph, "add")
    assert graph.tensors[total.outputs[0]].requires_grad


def test_a_write_without_gradient_stays_as_it_is(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path, "out = x.new_zeros(x.shape)", "out[:, 1:] = x[:, 1:]", "return self.linear(out)"
    )
    assert ops_of(graph, "copy_")


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_dropout_of_nothing_hands_on_its_input_s_memory(tmp_path: Path, share: float) -> None:
    graph = graph_of(
        tmp_path,
        "y = self.linear(x)",
        f"z = nn.functional.dropout(y, {share})",
        "z.mul_(2)",
        "return y + z",
    )
    (linear,), (write,) = (ops_of(graph, of) for of in ("linear", "mul_"))
    written = {graph.tensors[name].storage for name in write.writes}
    assert (written == set(linear.outputs)) == (share == 0.0)
