"""Lines at which torch.compile would stop are found with the layers that run them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from torch._dynamo import trace_rules

from autopar.notes import note_breaks
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Compile, compiled_ops, find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from autopar.planner.trace.breaks import graph_breaks
from autopar.planner.trace.scalar_questions import lengths_as_sizes
from tests.codegen.plans import pinned_plan
from tests.planner.subjects import zoo_file, zoo_graph

MODEL = """
import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, *, scales: dict[str, float]) -> Tensor:
        return x + self.down(self.up(x).relu() * scales["up"])


class Told(Block):
    def forward(self, x: Tensor, *, scales: dict[str, float]) -> Tensor:
        made = super().forward(x, scales=scales)
        with open("/dev/null") as file:  # STOP
            file.read()
        return made * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.told = nn.ModuleList([Told() for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in [*self.blocks, *self.told]:
            x = block(x, scales={"up": 0.5})
        return nn.functional.cross_entropy(self.head(x), labels)


def build_model() -> nn.Module:
    return Model()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, 8), "labels": torch.randint(3, (batch_size,))}
"""


@pytest.fixture
def broken(tmp_path: Path) -> Graph:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    file = load_model_file(str(path), ())
    graph = trace(file)
    return replace(graph, breaks=graph_breaks(file, graph))


def test_a_line_that_is_not_traced_keeps_its_layers_from_being_compiled(broken: Graph) -> None:
    (found,) = broken.breaks
    line = MODEL.splitlines().index('        with open("/dev/null") as file:  # STOP') + 1
    assert found.paths == ("told.0", "told.1")
    assert found.where.endswith(f"model.py:{line}")
    assert "`open`" in found.why

    layers = find_layers(broken, infer_axes(broken))
    taken = [broken.calls[one.call].path for one in layers.layers if compiled_ops(one, broken)]
    assert taken == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_layer_that_is_not_compiled_is_priced_as_it_is(broken: Graph) -> None:
    axes = infer_axes(broken)
    (node,) = choose_cluster(1, "h100-sxm").nodes
    prices = {
        compiles: OpPricer(
            broken,
            axes,
            batch=4,
            precision=Precision.FP32,
            device=node.device,
            compile_=Compile.LAYERS if compiles else Compile.NONE,
        )
        for compiles in (False, True)
    }
    changed = {
        broken.calls[broken.index.around(op.call)[-1]].path or op.call
        for op in broken.ops
        if prices[False].launches(op) != prices[True].launches(op)
    }
    assert changed == {"blocks.0", "blocks.1", "blocks.2"}


@pytest.mark.parametrize("name", ["gpt2.py"])
def test_layers_of_the_zoo_are_traced_whole(name: str) -> None:
    assert graph_breaks(zoo_file(name), zoo_graph(name)) == ()


def test_a_plan_tells_what_it_leaves_as_it_is(
    broken: Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = pinned_plan("gpt2.py", ("layers=2",), compile=Compile.LAYERS, data=2)
    note_breaks(replace(plan, graph=broken))
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "torch.compile cannot compile told.0 and 1 like it as a whole (model.py, line 18: with"
        in told
    )
    two_kinds = [replace(broken.breaks[0], paths=(name,)) for name in ("a", "b")]
    note_breaks(replace(plan, graph=replace(broken, breaks=tuple(two_kinds))))
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("cannot compile") == 1, "one line is told once"
    assert "cannot compile a and 1 like it" in told

    eager = replace(plan.arrangement, compile=Compile.NONE)
    note_breaks(replace(plan, graph=broken, arrangement=eager))
    assert not capsys.readouterr().err


def test_dynamo_knows_the_builtins_although_a_trace_replaces_some() -> None:
    with patch.object(trace_rules._builtin_function_ids, "function_ids", None):
        with lengths_as_sizes():
            trace_rules.is_builtin_callable(len)
        assert trace_rules.is_builtin_callable(len)
