"""A backward that the model's code defines is traced, and judged as a forward is."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.findings.rows import meeting_rows
from autopar.planner.graph.graph import BackwardFault, Graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.limits import takes_whole_gradients
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import meaning_notes, rows_meet
from autopar.planner.trace import trace
from tests.codegen.equality import compare
from tests.codegen.plans import plan_for
from tests.planner.trace.model_source import line_of, linear_model, traced, written

FUNCTION = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        {forward}

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return {backward}
"""
ON_ROWS = "return Own.apply(self.linear(x), self.linear.bias)"
ON_WEIGHT = "return F.linear(x, Own.apply(self.linear.weight, self.linear.bias))"


def function(
    backward: str, *, forward: str = "return x * w", body: str = ON_ROWS, more: str = ""
) -> str:
    return FUNCTION.format(forward=forward, backward=backward) + more + linear_model(body)


def on_weight(backward: str) -> str:
    return function(backward, forward="return x.round()", body=ON_WEIGHT)


def hooked(line: str) -> str:
    return linear_model("y = self.linear(x)", f"y.register_hook({line})", "return y")


def module_hooked(kind: str, hook: str) -> str:
    hooks = f"model.linear[0].register_full_backward_{kind}({hook})"
    source = linear_model("return self.linear(x)")
    source = source.replace("nn.Linear(4, 4)", "nn.Sequential(nn.Linear(4, 4))")
    return source.replace("return Model()", f"model = Model()\n    {hooks}\n    return model")


def registered(name: str, backward: str) -> str:
    return f"""
@torch.library.custom_op("rows::{name}", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return x * x

@own.register_fake
def _(x):
    return torch.empty_like(x)

def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

def back(ctx, g):
    (x,) = ctx.saved_tensors
    return {backward}

own.register_autograd(back, setup_context=keep)
""" + linear_model("return own(self.linear(x))")


_LOSS = """
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        chances = x.softmax(-1)
        ctx.save_for_backward({saved})
        return -chances[:, 0].log().mean()

    @staticmethod
    def backward(ctx, g):
        return {backward}

def loss(outputs, batch):
    return Loss.apply(outputs.float())
""" + linear_model("return self.linear(x)")
_AUXILIARY = function(
    "g, {gradient}",
    forward="return x.view_as(x)",
    body="y = self.linear(x); return Own.apply(y, y.square().mean())",
)

MEETING = {
    "norm of all rows": function("g / g.norm() * w, (g * x).sum(0)"),
    "centred": function("g - g.mean(0), None"),
    "a mean for a weight": function("g * w, (g * x).mean(0)"),
    "divided by the rows": function("g * w / g.shape[0], None"),
    "a weight's divided": function("g * w, (g * x).sum(0) / len(g)"),
    "saved by the forward": function("g * ctx.m, None", forward="ctx.m = x.mean(0); return x * w"),
    "made by the forward": function(
        "g * ctx.m, None", forward="ctx.m = x - x.mean(0); return x * w"
    ),
    "read as a number": function("g / g.norm().item(), None"),
    "clipped at a weight": on_weight("g.clamp(-1, 1), None"),
    "an auxiliary loss": _AUXILIARY.format(gradient="torch.ones_like(w)"),
    "a hook": hooked("lambda g: g / g.norm()"),
    "a hook of a module": module_hooked("pre_hook", "lambda m, o: (o[0] - o[0].mean(0),)"),
    "an op of a library": registered("normed", "g * 2 * x / g.norm()"),
    "an op that is given names": registered("named", "g * 2 * x / g.norm()").replace(
        "own(self.linear(x))", "torch.ops.rows.named(x=self.linear(x))"
    ),
    "equal blocks": function("g / g.norm(), None").replace(
        "return Model()", "return Stack(Model(), Model())"
    ),
}
APART = {
    "straight through": function("g, None"),
    "reversed": function("-0.5 * g, None"),
    "clipped": function("g.clamp(-1, 1), None"),
    "each row by its norm": function("g / g.norm(dim=-1, keepdim=True), (g * x).sum(0)"),
    "masked": function("g.masked_fill(x.abs() > 1, 0), None"),
    "a product": function("g @ w, x.T @ g", forward="return x @ w", body=ON_ROWS.replace("bias",
        "weight")),
    "a masked weight": on_weight("torch.where(x.abs() > 1, torch.zeros_like(g), g), None"),
    "a scale that learns": on_weight("g * (x.abs() < w.mean()), (g * x).sum(0) * 0.1"),
    "no loss of its own": _AUXILIARY.format(gradient="torch.zeros_like(w)"),
    "a loss": _LOSS.format(saved="chances / len(x)", backward="ctx.saved_tensors[0] * g"),
    "a hook": hooked("lambda g: g / 2"),
    "a hook that looks": hooked("lambda g: print(g.norm())"),
    "a hook of a module": module_hooked("hook", "lambda m, i, o: None"),
    "an op of a library": registered("squared", "g * 2 * x"),
}  # fmt: skip


@pytest.mark.parametrize("way", MEETING)
def test_rows_that_meet_in_a_backward_meet(tmp_path: Path, way: str) -> None:
    graph = traced(tmp_path, MEETING[way])
    assert meeting_rows(graph) is not None


@pytest.mark.parametrize("way", APART)
def test_rows_that_a_backward_keeps_apart_do_not_meet(tmp_path: Path, way: str) -> None:
    graph = traced(tmp_path, APART[way])
    assert meeting_rows(graph) is None
    assert unread_faults(graph) == []


def unread_faults(graph: Graph) -> list[str]:
    return [one.name for one in graph.own_backwards if one.fault is BackwardFault.UNREAD]


def test_it_is_said_in_which_backward_and_line(tmp_path: Path) -> None:
    graph = traced(tmp_path, MEETING["norm of all rows"])
    met = meeting_rows(graph)
    assert met is not None
    line = line_of(tmp_path / "subject.py", "g / g.norm()")
    assert rows_meet(met, graph) == (
        f"the rows of a batch meet in div of Own.backward (subject.py:{line})"
    )


def test_a_backward_adds_nothing_to_the_graph(tmp_path: Path) -> None:
    graph = traced(tmp_path, function("g / g.norm() * w, (g * x).sum(0)"))
    assert [op.target.split(".")[1] for op in graph.ops] == [
        "linear", "mul", "to", "square", "mean",
    ]  # fmt: skip


def test_what_a_backward_changes_in_python_is_undone(tmp_path: Path) -> None:
    source = "CALLS = []\n" + function("(CALLS.append(1), g)[1], None")
    assert meeting_rows(traced(tmp_path, source)) is None


def test_a_decision_by_the_rows_in_a_backward_fixes_them(tmp_path: Path) -> None:
    graph = traced(tmp_path, function("(2 * g if len(g) > 4 else g), None"))
    assert graph.fixed_batch is not None
    assert graph.fixed_at.endswith(f":{line_of(tmp_path / 'subject.py', 'len(g) > 4')}")


DECIDING = function("(g / g.norm() if g.norm() > 1 else g), None")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (DECIDING, "the values of a tensor decide what it computes"),
        (function("torch.from_numpy(g.numpy()), None"), ".numpy() is not supported"),
        (function("undefined(g), None"), "name 'undefined' is not defined"),
    ],
)
def test_a_backward_that_cannot_be_traced_is_named(tmp_path: Path, source: str, why: str) -> None:
    graph = traced(tmp_path, source)
    (own,) = graph.own_backwards
    assert (own.name, own.fault) == ("Own.backward", BackwardFault.UNREAD)
    assert own.why.startswith(why)
    assert own.where.startswith(str(tmp_path / "subject.py"))


def planned(tmp_path: Path, source: str, data: int) -> Plan:
    file = load_model_file(str(written(tmp_path, source)), [])
    return plan_for(file, trace(file), (), degrees=(1, data, 1), microbatch=2 if data > 1 else 8)


def test_it_is_said_what_to_check_of_it_where_a_batch_is_split(tmp_path: Path) -> None:
    said = [note for note in meaning_notes(planned(tmp_path, DECIDING, 2)) if "Own" in note]
    assert len(said) == 1
    assert "else pin dp=1" in said[0]
    assert "Own" not in " ".join(meaning_notes(planned(tmp_path, DECIDING, 1)))


@pytest.mark.parametrize(
    ("backward", "is_whole"),
    [("g.clamp(-1, 1), None", True), ("g * w - 2 * g, (g * x).sum(0)", False)],
)
def test_gradients_that_are_clipped_are_as_large_as_on_one_device(
    tmp_path: Path, backward: str, *, is_whole: bool
) -> None:
    plan = planned(tmp_path, function(backward), 2)
    assert takes_whole_gradients(plan.graph, plan.arrangement) is is_whole
    script = write_script(plan, tmp_path).read_text()
    assert ("(loss / mesh.data.size).backward()" in script) is is_whole


def test_a_clipped_gradient_trains_as_on_one_device(tmp_path: Path) -> None:
    plan = planned(tmp_path, function("g.clamp(-0.001, 0.001) * w, None"), 2)
    found = compare(plan, steps=2)
    assert found.faults == ()
    assert found.parameter.largest < 1e-12
