"""Buffers that the forward writes to, and tied weights, are told in the graph."""

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.ops import TensorOrigin
from tests.planner.trace.model_source import buffer_of, ops_of, traced

NORMED = """
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("kept", torch.ones(4), persistent=False)

        def forward(self, x):
            self.count += 1
            return self.norm(self.linear(x)) * self.kept

    def build_model():
        return Normed()
"""


@pytest.mark.parametrize(
    ("name", "updated"),
    [
        ("norm.running_mean", True),
        ("norm.running_var", True),
        ("norm.num_batches_tracked", True),
        ("count", True),
        ("kept", False),
    ],
)
def test_buffers_that_the_forward_writes_are_marked(
    tmp_path: Path, name: str, updated: bool
) -> None:
    assert buffer_of(traced(tmp_path, NORMED), name).updated is updated


def test_buffers_know_whether_they_are_saved(tmp_path: Path) -> None:
    graph = traced(tmp_path, NORMED)
    assert buffer_of(graph, "count").persistent
    assert not buffer_of(graph, "kept").persistent


WRITTEN = """
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            {initial}

        def forward(self, x):
            {change}
            return self.linear(x)

    def build_model():
        return Written()
"""


@pytest.mark.parametrize(
    "update",
    [
        "self.count[0] += 1",
        "self.count.copy_(self.count + 1)",
        "self.count.view(2, 2).add_(1)",
        "self.count = self.count + 1",
    ],
)
def test_an_update_by_any_means_marks_the_buffer(tmp_path: Path, update: str) -> None:
    source = WRITTEN.format(initial="self.register_buffer('count', torch.zeros(4))", change=update)
    assert buffer_of(traced(tmp_path, source), "count").updated


def test_an_update_under_no_grad_marks_the_buffer_and_comes_before_its_use(tmp_path: Path) -> None:
    source = """
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return y - self.mean

    def build_model():
        return Average()
    """
    graph = traced(tmp_path, source)
    (added,), (difference,) = ops_of(graph, "add_"), ops_of(graph, "sub")
    assert buffer_of(graph, "mean").updated
    assert not added.grad_enabled
    assert difference.inputs[1] == added.outputs[0]


REPLACED = """
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.linear(x)
            self.mean = {value}
            return y - self.mean

    def build_model():
        return Stack(Average(), Average(), Average())
"""


def test_a_buffer_replaced_in_a_repeated_block_is_written_in_each(tmp_path: Path) -> None:
    graph = traced(tmp_path, REPLACED.format(value="0.9 * self.mean + y.mean(0).detach()"))
    writes = [name for op in ops_of(graph, "copy_") for name in op.writes]
    assert writes == ["0.mean", "1.mean", "2.mean"]
    assert all(buffer.updated for buffer in graph.buffers)


@pytest.mark.parametrize(
    ("value", "fault"),
    [("y.mean(0)", "a value with gradient"), ("torch.zeros(1, 4)", "a value of another shape")],
)
def test_a_buffer_replaced_by_what_no_buffer_can_hold_is_refused(
    tmp_path: Path, value: str, fault: str
) -> None:
    with pytest.raises(TraceError, match=f"assigns {fault} to the buffer mean") as raised:
        traced(tmp_path, REPLACED.format(value=value))
    assert raised.value.where == "module 0"


def test_a_buffer_that_is_called_as_an_op_is_keeps_its_name(tmp_path: Path) -> None:
    source = """
        class Standard(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.sub = nn.Parameter(torch.ones(4))
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("std", torch.ones(4))

            def forward(self, x):
                x = self.linear((x - self.mean) / self.std) - self.sub
                return x / x.std(1, keepdim=True) + x.mean(1, keepdim=True)

        def build_model():
            return Standard()
    """
    graph = traced(tmp_path, source)
    origins = {name: graph.tensors[name].origin for name in ("mean", "std", "sub")}
    assert origins == {
        "mean": TensorOrigin.BUFFER,
        "std": TensorOrigin.BUFFER,
        "sub": TensorOrigin.PARAMETER,
    }
    made = [name for op in graph.ops for name in op.outputs]
    assert len(set(made)) == len(made)
    assert not set(made) & set(origins)
