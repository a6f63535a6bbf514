"""A number outside the model that each step changes is refused by name, and put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.cells import cells
from tests.planner.trace.model_source import linear_model, traced, written

LOSS = """
import itertools

STEP, COUNT, SEEN, SCALES = 0, itertools.count(1), [0], iter([1.0, 0.5] * 50)


def falling():
    scale = 1.0
    while True:
        yield scale
        scale /= 2


FALLING = falling()


class Settings:
    step = 0


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, outputs, batch):
        {inside}
        return outputs.square().mean() * self.step


criterion = Warm()


def counting():
    calls = 0

    def loss(outputs, batch):
        nonlocal calls
        calls += 1
        return outputs.square().mean() * calls

    return loss


def loss(outputs, batch, state={{"n": 0}}):
    {line}
    return outputs.square().mean()


loss.calls = 0
"""
COUNTED = {
    "STEP": ("global STEP; STEP += 1", "STEP of subject.py"),
    "COUNT": ("outputs = outputs * next(COUNT)", "COUNT of subject.py"),
    "an iterator": ("outputs = outputs * next(SCALES)", "SCALES of subject.py"),
    "a generator": ("outputs = outputs * next(FALLING)", "FALLING of subject.py"),
    "the environment": (
        "import os; os.environ['STEP'] = os.environ.get('STEP', '') + '1'",
        "os.environ['STEP']",
    ),
    "SEEN": ("SEEN[0] += 1", "SEEN[0] of subject.py"),
    "Settings": ("Settings.step += 1", "Settings.step of subject.py"),
    "default": ("state['n'] += 1", "loss.__defaults__[0]['n'] of subject.py"),
    "function": ("loss.calls += 1", "loss.calls of subject.py"),
    "module": ("return criterion(outputs, batch)", "criterion.step of subject.py"),
}


# tests/planner/model/test_outside.py has all places.
@pytest.mark.parametrize("name", cells(COUNTED, ("STEP", "an iterator", "module")))
def test_a_loss_that_counts_its_calls_is_refused_by_the_name_of_the_count(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, place = COUNTED[name]
    monkeypatch.setenv("STEP", "")
    with pytest.raises(TraceError) as told:
        traced(tmp_path, linear_model("return self.linear(x)") + LOSS.format(
            line=line, inside="self.step += 1"))  # fmt: skip
    assert f"each run of the forward or the loss changes {place}" in str(told.value)
    assert "register_buffer" in told.value.fix


def test_a_buffer_of_a_loss_that_counts_is_refused(tmp_path: Path) -> None:
    loss = LOSS.format(line="return criterion(outputs, batch)", inside="self.steps += 1")
    with pytest.raises(TraceError, match=r"criterion\.steps"):
        traced(tmp_path, linear_model("return self.linear(x)") + loss)


def test_a_count_in_a_closure_is_refused(tmp_path: Path) -> None:
    loss = LOSS.format(line="pass", inside="pass") + "\n\nloss = counting()\n"
    with pytest.raises(TraceError, match=r"changes loss\.calls of subject\.py"):
        traced(tmp_path, linear_model("return self.linear(x)") + loss)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("type(self).calls = getattr(self, 'calls', 0) + 1", "Model.calls of subject.py"),
        ("self.counter.n += 1", "counter.n of module (root)"),
        ("self.log['n'] += 1", "log['n'] of module (root)"),
    ],
)
def test_a_forward_that_counts_is_refused(tmp_path: Path, line: str, place: str) -> None:
    model = linear_model(line, "return self.linear(x)").replace(
        "self.linear = ",
        "self.counter, self.log = Counter(), {'n': 0, 'model': Model}; self.linear = ",
    )
    with pytest.raises(TraceError, match="keep one value") as told:
        traced(tmp_path, "class Counter:\n    n = 0\n\n" + model)
    assert place.split(" of ")[0].split(".")[-1].split("[")[0] in str(told.value)


def test_what_a_trace_changes_outside_is_put_back(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "KEPT, LOGGED = {}, []\n"
        + linear_model("KEPT[x.shape[1]] = torch.ones(4)", "return self.linear(x * KEPT[4])")
        + "\n\ndef loss(outputs, batch):\n    LOGGED[:] = [outputs.detach()]\n"
        "    return outputs.square().mean()\n",
    )
    file = load_model_file(str(path))
    assert file.loss is not None
    trace(file)
    kept = file.loss.__wrapped__.__globals__  # type: ignore[attr-defined]
    assert kept["KEPT"] == {}
    assert kept["LOGGED"] == []
