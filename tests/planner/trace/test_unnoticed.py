"""What is traced is what training runs, and what nobody could know is traced as it says itself."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import fake_tensor

from autopar.planner.errors import TraceError
from autopar.planner.trace.unlike_types import trace_hidden
from tests.planner.trace.model_source import ops_of, traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        is_seen = {seen}
        return self.scale(x.sin() if is_seen else x.cos())

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    "seen",
    [
        "torch.compiler.is_exporting()",
        "torch.compiler.is_compiling()",
        "isinstance(x, torch._subclasses.FakeTensor)",
    ],
)
def test_a_model_does_what_it_does_in_training(tmp_path: Path, seen: str) -> None:
    graph = traced(tmp_path, MODEL.format(seen=seen))
    assert ops_of(graph, "cos")
    assert not ops_of(graph, "sin")
    assert not graph.was_noticed


def test_a_model_that_reads_values_in_training_alone_is_traced_as_it_says_itself(
    tmp_path: Path,
) -> None:
    graph = traced(tmp_path, MODEL.format(seen="torch.compiler.is_exporting() or (x > 0).all()"))
    assert ops_of(graph, "sin")
    assert graph.was_noticed


def test_a_model_that_always_reads_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="decides on the values of a tensor"):
        traced(tmp_path, MODEL.format(seen="(x > 0).all()"))


def test_torch_itself_is_told_the_truth() -> None:
    truths = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    with trace_hidden():
        assert torch._subclasses.FakeTensor is not fake_tensor.FakeTensor
        empty = fake_tensor.FakeTensorMode().from_tensor(torch.ones(2))
        assert "FakeTensor" in repr(empty)
    assert torch._subclasses.FakeTensor is fake_tensor.FakeTensor
    assert (torch.compiler.is_compiling, torch.compiler.is_exporting) == truths
