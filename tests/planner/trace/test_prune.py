"""What the loss does not depend on is dropped, and the calls that compute it are known."""

from __future__ import annotations

from pathlib import Path

from tests.planner.trace.model_source import traced

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
