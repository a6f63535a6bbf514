"""What the loss does not depend on is dropped, and the calls that compute it are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.trace.model_source import ops_of, traced

SOURCE = """
class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y, y.view(-1, 2, 2).sum(-1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.looking, self.plain = Looking(), nn.Linear(4, 4)

    def forward(self, x):
        return self.plain(self.looking(x)[0])

def build_model():
    return Model()
"""


def test_a_call_that_computes_what_nobody_uses_says_so(tmp_path: Path) -> None:
    graph = traced(tmp_path, SOURCE)
    assert not any("view" in op.target for op in graph.ops)
    unused = {key for key, call in graph.calls.items() if call.has_unused}
    assert unused == {"looking"}


DEAD_CHILD = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), Stack(nn.Linear(4, 4))

    def forward(self, x, y):
        return self.one(x), self.other(y)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.plain = Layer(), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x, self.plain(x))[0]

def build_model():
    return Model()
"""


def test_a_call_around_a_dead_one_computes_what_nobody_uses(tmp_path: Path) -> None:
    graph = traced(tmp_path, DEAD_CHILD)
    unused = {key for key, call in graph.calls.items() if call.has_unused}
    assert {"layer", "layer.other"} <= unused


IDLE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        {body}
        return self.scale(x).sum() + x.sum()

def build_model():
    return Model()
"""


@pytest.mark.parametrize("op", ["x + 0", "x * 1.0", "x - 0", "x / 1"])
def test_what_changes_no_number_is_left_out(tmp_path: Path, op: str) -> None:
    graph, bare = (traced(tmp_path, IDLE.format(body=f"x = {one}")) for one in (op, "x"))
    assert [one.target for one in graph.ops] == [one.target for one in bare.ops]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("x = x * 0", "mul"),
        ("x = x - 1", "sub"),
        ("x = x.floor() + ((x > 0) + 0)", "add"),  # makes numbers of truths
        ("y = x * 1.0; y[:, 0] = 5.0; x = x.floor() - y", "mul"),  # a copy: x is read later
        ("y = x.floor(); z = y * 1.0; y.neg_(); x = y - z", "mul"),
        ("y = self.scale(x)\n        with torch.no_grad(): x = y * 1.0", "mul"),
    ],
)
def test_what_changes_type_memory_or_gradient_stays(tmp_path: Path, body: str, kept: str) -> None:
    assert ops_of(traced(tmp_path, IDLE.format(body=body)), kept)
