"""Modes of modules stay as build_model leaves them; what surprises in that is told, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from tests.planner.trace.model_source import line_of, traced

MODEL = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return {part}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        return self.second(self.first(x))


def build_model():
    model = Model()
    {line}
    return {returned}
"""
DROPPED = "F.dropout(self.linear(x), 0.5, self.training)"


def source(line: str = "pass", *, returned: str = "model", part: str = DROPPED) -> str:
    return MODEL.format(line=line, returned=returned, part=part)


@pytest.mark.parametrize(
    ("returned", "fix"),
    [
        ("model.eval()", "return model.train()"),
        ("nn.Sequential(model).eval()", "return nn.Sequential(model).train()"),
        ("(lambda: model.eval())()", "return (lambda: model.eval())().train()"),
        ("model.eval() if model else None", "return (model.eval() if model else None).train()"),
    ],
)
def test_a_model_that_evaluates_is_refused_with_the_line_to_write(
    tmp_path: Path, returned: str, fix: str
) -> None:
    with pytest.raises(InputError, match="the model is in eval mode") as told:
        traced(tmp_path, source(returned=returned))
    path = tmp_path / "subject.py"
    assert told.value.where == f"{path}:{line_of(path, 'return ' + returned)}"
    assert told.value.fix == fix


def test_a_factory_without_a_return_of_its_own_is_named(tmp_path: Path) -> None:
    made = source() + "\n\nbuild_model = lambda made=build_model: made().eval()\n"
    with pytest.raises(InputError, match="the model is in eval mode") as told:
        traced(tmp_path, made)
    assert told.value.where == f"build_model of {tmp_path / 'subject.py'}"
    assert told.value.fix == "return model.train()"


@pytest.mark.parametrize(
    ("line", "part", "told"),
    [
        ("model.second.eval()", DROPPED, ("second",)),
        ("model.first.eval(); model.second.eval()", DROPPED, ("first", "second")),
        ("model.second.eval()", "self.norm(self.linear(x))", ("second",)),
        ("model.second.eval()", "self.linear(x)", ()),  # which computes the same in both modes
        ("model.second.eval().requires_grad_(False)", DROPPED, ()),
        ("model.second.norm.eval()", "self.norm(self.linear(x))", ()),  # put so on purpose
    ],
)
def test_a_part_that_evaluates_and_yet_learns_is_told(
    tmp_path: Path, line: str, part: str, told: tuple[str, ...]
) -> None:
    assert traced(tmp_path, source(line, part=part)).in_eval_mode == told


def test_modes_are_those_of_the_constructor_and_not_of_train(tmp_path: Path) -> None:
    graph = traced(tmp_path, source("model.second.eval()"))
    rates = [op for op in graph.ops if op.target == "aten.dropout.default"]
    assert [op.call for op in rates] == ["first"]


@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("pass", []),
        ("self.second.eval()", ["second", "second.linear"]),
        ("self.second.train()", []),
        ("self.second.linear.training = False", ["second.linear"]),
    ],
)
def test_a_mode_that_a_forward_sets_is_known(tmp_path: Path, line: str, called: list[str]) -> None:
    before = "        return self.second(self.first(x))"
    set_in = source().replace(before, f"        {line}\n{before}")
    graph = traced(tmp_path, set_in)
    assert [key for key, call in graph.calls.items() if call.mode_is_set] == called
