"""What of a batch a model's forward is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, {takes}):
        return self.linear({reads})

def example_batch(batch_size):
    return {{"x": torch.randn(batch_size, 4), "y": torch.randn(batch_size, 4)}}

def loss(outputs, batch):
    return (outputs - batch["y"]).square().mean()

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("takes", "reads", "given"),
    [
        ("x", "x", ["x"]),
        ("x, **others", "x", ["x"]),
        ("**batch", "batch['x']", ["x", "y"]),
        ("*args, **batch", "batch['x']", ["x", "y"]),
        ("mask=None, **batch", "batch['x']", ["x", "y"]),
    ],
)
def test_a_forward_is_given_what_it_names_or_else_all_that_there_is(
    tmp_path: Path, takes: str, reads: str, given: list[str]
) -> None:
    graph = traced(tmp_path, MODEL.format(takes=takes, reads=reads))
    (model,) = (call for call in graph.calls.values() if not call.path)
    assert sorted(name for name, _ in model.keywords) == given


def test_a_forward_of_everything_still_needs_what_it_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="forward needs z, which the batch does not have"):
        traced(tmp_path, MODEL.format(takes="z, **batch", reads="z"))


SHARING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x{more}):
        {line}
        return self.linear(x){used}

def example_batch(batch_size):
    x = torch.randn(batch_size, 8)
    return {{"x": x[:, :4], "y": {y}}}

def loss(outputs, batch):
    return (outputs - batch["y"]).square().mean()

def build_model():
    return Model()
"""


@pytest.mark.parametrize("y", ["x[:, :4]", "x[:, 4:]", "x.T[:4].T"])
def test_two_keys_are_two_inputs_whatever_memory_they_share(tmp_path: Path, y: str) -> None:
    graph = traced(tmp_path, SHARING.format(y=y, line="pass", more=", y", used=" * y"))
    assert graph.inputs == ("x", "y")
    (product,) = (op for op in graph.ops if op.target == "aten.mul.Tensor")
    (difference,) = (op for op in graph.ops if op.target == "aten.sub.Tensor")
    (linear,) = (op for op in graph.ops if op.target == "aten.linear.default")
    assert linear.inputs[0] == "x"
    assert product.inputs[1] == difference.inputs[1] == "y"


def test_an_entry_in_the_memory_of_another_is_not_written_to(tmp_path: Path) -> None:
    sharing = SHARING.format(y="x[:, 4:]", line="x.mul_(2)", more="", used="")
    with pytest.raises(InputError, match=r"writes to batch\['x'\]") as told:
        traced(tmp_path, sharing)
    assert "'x': ids.clone()" in told.value.fix
    apart = SHARING.format(y="torch.zeros_like(x[:, 4:])", line="x.mul_(2)", more="", used="")
    assert traced(tmp_path, apart)


def test_an_entry_that_is_the_number_of_rows_is_refused(tmp_path: Path) -> None:
    counted = MODEL.format(takes="x, n", reads="x / n")
    with pytest.raises(InputError, match=r"batch\['n'\] is the number of rows"):
        traced(tmp_path, counted.replace('{"x"', '{"n": batch_size, "x"'))
    assert traced(tmp_path, counted.replace('{"x"', '{"n": 7, "x"'))
