"""Where a model works on gradients by itself is noted, and what it takes is one op."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.findings.loss import Follows, all_of_parts
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import LOSS_CALL, GradientUse
from tests.planner.trace.model_source import line_of, linear_model, ops_of, traced


def model(tmp_path: Path, *lines: str) -> Graph:
    return traced(tmp_path, linear_model(*lines, "return y"))


USES = {
    "y = self.linear(x); y.register_hook(lambda g: g / 2)": (
        GradientUse.CHANGED, "Tensor.register_hook"),
    "y = self.linear(x); y.grad_fn.register_hook(lambda *g: None)": (
        GradientUse.CHANGED, "Tensor.grad_fn"),
    "y = self.linear(x); y.retain_grad()": (GradientUse.KEPT, "Tensor.retain_grad"),
    "y = self.linear(x); torch.autograd.grad(y.sum(), self.linear.weight)": (
        GradientUse.TAKEN, "torch.autograd.grad"),
}  # fmt: skip


@pytest.mark.parametrize("line", USES)
def test_what_works_on_gradients_is_noted_with_its_line(tmp_path: Path, line: str) -> None:
    (found,) = model(tmp_path, line).own_gradients
    use, how = USES[line]
    path = tmp_path / "subject.py"
    assert (found.call, found.use, found.how) == ("", use, how)
    assert found.where == f"{path}:{line_of(path, line)}"


@pytest.mark.parametrize(
    ("way", "is_noted"),
    [
        ("saved_tensors_hooks(lambda t: t, lambda t: t)", True),
        ("save_on_cpu()", False),  # the same numbers, elsewhere
    ],
)
def test_what_is_packed_for_a_backward_is_noted(tmp_path: Path, way: str, is_noted: bool) -> None:
    lines = (f"with torch.autograd.graph.{way}:", "    y = self.linear(x)")
    assert bool(model(tmp_path, *lines).own_gradients) is is_noted


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_a_module_with_a_hook_on_its_backward_is_noted(tmp_path: Path, kind: str) -> None:
    hooked = linear_model("return self.linear(x)").replace(
        "nn.Linear(4, 4)", "nn.Sequential(nn.Linear(4, 4))"
    )
    hooked = hooked.replace(
        "return Model()",
        "model = Model()\n"
        f"    model.linear[0].register_{kind}_hook(lambda *given: None)\n"
        "    return model",
    )
    (found,) = traced(tmp_path, hooked).own_gradients
    assert (found.call, found.use, found.where) == (
        "linear.0",
        GradientUse.CHANGED,
        "module linear.0",
    )


def test_each_of_equal_blocks_has_its_own(tmp_path: Path) -> None:
    blocks = linear_model("y = self.linear(x)", "y.register_hook(lambda g: g)", "return y")
    graph = traced(tmp_path, blocks.replace("return Model()", "return Stack(Model(), Model())"))
    assert [one.call for one in graph.own_gradients] == ["0", "1"]


TAKEN = "(g,) = torch.autograd.grad({of}, x, {ones}create_graph={graph})"


@pytest.mark.parametrize(
    ("of", "ones", "follows"),
    [
        ("y.square().sum()", "", Follows.SUM),
        ("y.square()", "torch.ones_like(y), ", Follows.SUM),
        ("y.square().mean()", "", Follows.MEETS),  # which has the number of rows in it
    ],
)
def test_a_gradient_of_each_row_is_that_of_a_sum_over_rows(
    tmp_path: Path, of: str, ones: str, follows: Follows
) -> None:
    weight = "torch.autograd.grad({of}, self.linear.weight, {ones}create_graph=True)"
    graph = model(
        tmp_path,
        "y = self.linear(x)",
        f"(g,) = {weight.format(of=of, ones=ones)}",
        "y = y + 0 * g.sum()",
    )
    (op,) = ops_of(graph, "gradient")
    assert all_of_parts(graph)[op.outputs[0]] is follows


@pytest.mark.parametrize("learns", [True, False])
def test_a_gradient_learns_where_a_graph_of_it_is_made(tmp_path: Path, learns: bool) -> None:
    graph = model(
        tmp_path,
        "x = self.linear(x)",
        "y = self.linear(x)",
        TAKEN.format(of="y.sum()", ones="", graph=learns),
        "y = y + g",
    )
    (op,) = ops_of(graph, "gradient")
    (made,) = op.outputs
    (added,) = (one for one in ops_of(graph, "add") if made in one.inputs or not learns)
    assert graph.tensors[made].requires_grad
    assert graph.tensors[added.inputs[1]].requires_grad is learns


def test_a_gradient_that_the_loss_takes_is_noted_there(tmp_path: Path) -> None:
    loss = """
def loss(outputs, batch):
    (g,) = torch.autograd.grad(outputs.sum(), outputs, create_graph=True)
    return outputs.square().mean() + g.square().sum()
"""
    graph = traced(tmp_path, linear_model("return self.linear(x)") + loss)
    assert [one.call for one in graph.own_gradients] == [LOSS_CALL]


def test_a_model_that_leaves_gradients_to_autograd_has_none(tmp_path: Path) -> None:
    assert model(tmp_path, "y = self.linear(x)").own_gradients == ()
