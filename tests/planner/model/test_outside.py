"""What lies outside a model is taken down, compared and put back, wherever code can keep it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autopar.planner.model.outside import StateScope, runs_torch_alone

SOURCE = """
import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial, wraps

import numpy
import torch
from torch import nn

STEP, NOTHING = 0, float("nan")
COUNT = itertools.count()
EACH, PAIRS = iter([1, 2, 3]), zip([1, 2, 3], itertools.cycle([4, 5]))
ARRAY, TENSOR = numpy.zeros(2), torch.zeros(2)
LISTED, NAMED, LAST, MET = [1, [2]], {"step": {"now": 0}}, deque([1], maxlen=2), {1}
PAIR = ([0],)


class Settings:
    heat = 1.0

    class Inner:
        heat = 1.0


@dataclass
class Slotted:
    __slots__ = ("step",)
    step: int


HELD, SLOTTED = Settings(), Slotted(0)


def make():
    n = 0

    def counting(seen=[], *, more={}):
        nonlocal n
        n += 1

    return counting


counting = make()
counting.calls = 0


@wraps(counting)
def around():
    counting()


def falling():
    scale = 1.0
    while True:
        yield scale
        scale /= 2


SCALES = falling()
BOUND, WITH = HELD.__init__, partial(counting, [0])


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.register_buffer("seen", torch.zeros(()))


criterion = Loss()
"""


@pytest.fixture
def file() -> Iterator[Any]:
    """A file of a model, as Python has loaded it."""
    module = ModuleType("state_of_a_model")
    module.__file__ = "/somewhere/state.py"
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    yield module
    del sys.modules[module.__name__]


CHANGES = {
    "STEP += 1": "STEP of state.py",
    "next(COUNT)": "COUNT of state.py",
    "next(EACH)": "EACH of state.py",
    "next(SCALES)": "SCALES of state.py",
    "ARRAY += 1": "ARRAY of state.py",
    "TENSOR += 1": "TENSOR[:] of state.py",
    "LISTED[0] += 1": "LISTED[0] of state.py",
    "LISTED[1].append(3)": "LISTED[1][1] of state.py",
    "LAST.append(4)": "LAST[1] of state.py",
    "MET.add(2)": "MET['2'] of state.py",
    "NAMED['step']['now'] += 1": "NAMED['step']['now'] of state.py",
    "PAIR[0].append(1)": "PAIR[0][1] of state.py",
    "Settings.heat = 0.5": "Settings.heat of state.py",
    "Settings.Inner.heat = 0.5": "Settings.Inner.heat of state.py",
    "HELD.heat = 0.5": "HELD.heat of state.py",
    "SLOTTED.step += 1": "SLOTTED.step of state.py",
    "counting()": "counting.n of state.py",
    "counting.__defaults__[0].append(1)": "counting.__defaults__[0][0] of state.py",
    "counting.__kwdefaults__['more']['n'] = 1": "counting.__kwdefaults__['more']['n'] of state.py",
    "counting.calls += 1": "counting.calls of state.py",
    "WITH.args[0].append(1)": "WITH.args[0][1] of state.py",
    "criterion.steps += 1": "criterion.steps of state.py",
    "criterion.seen += 1": "criterion.seen[:] of state.py",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_is_told_by_its_place(file: Any, change: str) -> None:
    outside = StateScope(files=(file,))
    before = outside.snapshot()
    assert before.changes_to(outside.snapshot()) == {}
    exec(change, vars(file))
    assert before.changes_to(outside.snapshot()) == {CHANGES[change]: True}


@pytest.mark.parametrize(
    "change",
    [one for one in CHANGES if not one.startswith(("next", "ARRAY", "TENSOR", "criterion.seen"))],
)
def test_what_has_changed_is_put_back(file: Any, change: str) -> None:
    outside = StateScope(files=(file,))
    before = outside.snapshot()
    exec(change, vars(file))
    before.put_back()
    assert before.changes_to(outside.snapshot()) == {}


def test_the_environment_is_outside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = StateScope(files=()).snapshot()
    monkeypatch.setenv("STEP_OF_A_TEST", "1")
    changes = before.changes_to(StateScope(files=()).snapshot())
    assert changes == {"os.environ['STEP_OF_A_TEST']": True}


class Part(nn.Module):
    """A module that has more than tensors and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[Any] = []


def test_attributes_of_the_modules_of_a_model_are_outside_its_parameters() -> None:
    part = Part()
    outside = StateScope(files=(), modules={"0": part, "0.linear": part.linear})
    before = outside.snapshot()
    with torch.no_grad():
        part.linear.weight += 1
    part.linear.weight.grad = torch.ones(2, 2)
    assert before.changes_to(outside.snapshot()) == {}
    part.seen.append("x")
    vars(part.linear)["scale"] = 2
    assert before.changes_to(outside.snapshot()) == {
        "seen[0] of module 0": True,
        "scale of module 0.linear": True,
    }
    before.put_back()
    assert part.seen == []
    assert "scale" not in vars(part.linear)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "is_torchs"),
    [
        (nn.Linear(2, 2), True),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True),
        (nn.MultiheadAttention(2, 1), True),
        (nn.Sequential(nn.Linear(2, 2), Part()), False),
        (nn.TransformerEncoderLayer(2, 1, activation=lambda x: x), False),
        (hooked(nn.Linear(2, 2)), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
    ],
)
def test_code_of_torch_alone_is_told_from_code_of_others(
    module: nn.Module, is_torchs: bool
) -> None:
    assert runs_torch_alone(module) is is_torchs
    module.forward = lambda: None
    assert not runs_torch_alone(module)


def test_objects_of_libraries_and_data_are_not_looked_into(file: Any) -> None:
    file.QUEUE = __import__("queue").Queue()
    file.DATA = list(range(5000))
    outside = StateScope(files=(file,))
    before = outside.snapshot()
    file.QUEUE.put(1)
    file.DATA[0] = 1
    assert before.changes_to(outside.snapshot()) == {}
    file.DATA.append(1)
    assert before.changes_to(outside.snapshot()) == {"DATA of state.py": True}


def test_classes_that_were_looked_into_are_let_go() -> None:
    kind = type("Kind", (), {"__module__": "file", "__slots__": ("number", "__weakref__")})
    file: Any = ModuleType("file")
    file.__file__, file.held = "file.py", kind()
    file.held.number = 1
    assert "number" in str(StateScope(files=(file,)).snapshot().leaves)
    is_there = weakref.ref(kind)
    del kind, file
    gc.collect()
    assert is_there() is None
