"""In a plan in 16 bits a buffer keeps its type, unless the model computes with it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.files.graph import graph_document, graph_of
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import narrowed_buffers_note
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.codegen.plans import plan_for
from tests.planner.subjects import zoo_graph
from tests.planner.trace.model_source import written

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("angles", torch.linspace(0, 1, 8))
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        y = self.up(x)
        {code}
        return self.down(self.norm(y)).sum()

def build_model():
    return Model()
"""
ROTARY = "y = y * (torch.arange(8).float() * self.angles).cos().to(y.dtype)"
EXPLICIT = "y = y + self.table.to(y.dtype)"
SUMMED = "y = y + self.table"
WRITTEN = "self.mean.mul_(0.999).add_(y.detach().mean(0), alpha=1e-3)"


def graph_of_code(folder: Path, *code: str, precision: Precision = Precision.BF16) -> Graph:
    text = MODEL.format(code="\n        ".join(code))
    return trace(load_model_file(str(written(folder, text)), []), precision=precision)


def narrowed(graph: Graph) -> set[str]:
    found = {one.name for one in graph.buffers if one.narrowed}
    assert {one.name for one in graph.buffers if one.dtype == MODEL_DTYPE} == found
    return found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ((ROTARY, EXPLICIT, "self.steps += 1", WRITTEN), set()),
        (("y = y * self.steps",), set()),  # a number alone leaves types as they are
        ((SUMMED,), {"table"}),
        ((ROTARY, SUMMED, "self.steps += 1"), {"table"}),
        ((SUMMED, WRITTEN, "y = y - self.mean.to(y.dtype)"), {"table"}),
        ((SUMMED, "y = torch.einsum('bi,i->bi', y, self.angles)"), {"table", "angles"}),
        # what it makes of a buffer meets activations as it is
        (("y = y * (2 * self.angles).cos()",), {"angles"}),
        ((WRITTEN, "y = y - self.mean"), {"mean"}),
    ],
)
def test_only_buffers_that_would_widen_activations_are_narrowed(
    code: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    assert narrowed(graph_of_code(tmp_path, *code)) == expected


def test_no_buffer_of_a_plan_in_fp32_is_narrowed(tmp_path: Path) -> None:
    graph = graph_of_code(tmp_path, SUMMED, precision=Precision.FP32)
    assert not any(one.narrowed for one in graph.buffers)


def test_statistics_of_batch_norms_are_in_fp32() -> None:
    graph = zoo_graph("resnet.py", precision=Precision.BF16)
    kinds = {one.dtype for one in graph.buffers if "running" in one.name}
    assert kinds == {"float32"}


@pytest.mark.parametrize("code", [("y = y + torch.rand(8)",), (SUMMED, "y = y + torch.rand(8)")])
def test_unlike_types_that_no_buffer_causes_are_refused(
    code: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=r"in bf16, .* multiplies|in bf16, layer_norm"):
        graph_of_code(tmp_path, *code)


def test_a_plan_notes_narrowed_buffers_and_keeps_them_in_its_file(tmp_path: Path) -> None:
    told = narrowed_buffers_note(_planned(graph_of_code(tmp_path, SUMMED), tmp_path))
    assert told.startswith("the model combines table (fp32) with activations in bf16")
    assert "forward writes" not in told
    graph = graph_of_code(tmp_path, WRITTEN, "y = y - self.mean")
    assert "The forward writes to mean" in narrowed_buffers_note(_planned(graph, tmp_path))
    assert graph_of(graph_document(graph)).buffers == graph.buffers
    assert narrowed_buffers_note(_planned(graph_of_code(tmp_path, ROTARY), tmp_path)) == ""


def _planned(graph: Graph, folder: Path) -> Plan:
    file = load_model_file(str(folder / "subject.py"), [])
    return plan_for(file, graph, (), degrees=(1, 1, 1), precision=Precision.BF16)
