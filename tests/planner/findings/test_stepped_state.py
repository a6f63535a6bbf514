"""What the step of an optimizer or a scheduler sets, and the forward reads, is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from autopar.planner.errors import InputError
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.trace.model_source import HEADER

MODEL = """
class Settings:
    heat = 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.unread = nn.Linear(4, 4), 1.0, 1.0
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x):
        return scaled(self.linear(x) * self.scale * self.heat)


def scaled(x):
    return x * Settings.heat


MODEL = None


def build_model():
    global MODEL
    MODEL = Model()
    return MODEL


def build_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: {stepped})
    return optimizer


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    def step(self, *given):
        super().step(*given)
        {scheduled}


def build_scheduler(optimizer):
    return Schedule(optimizer, lambda _: 1.0)
"""


def check(folder: Path, *, stepped: str = "None", scheduled: str = "pass") -> None:
    path = folder / "stepping.py"
    path.write_text(HEADER + dedent(MODEL.format(stepped=stepped, scheduled=scheduled)))
    file = load_model_file(str(path))
    graph = trace(replace(file, build_optimizer=None, build_scheduler=None))
    assert optimizer_traits(file, graph) is not None


@pytest.mark.parametrize(
    ("steps", "place"),
    [
        ({"scheduled": "Settings.heat *= 0.5"}, "Settings.heat of stepping.py"),
        ({"scheduled": "MODEL.scale *= 0.5"}, "scale of module (root)"),
        ({"stepped": "setattr(Settings, 'heat', 0.5)"}, "Settings.heat of stepping.py"),
        ({"stepped": "setattr(model, 'scale', 0.5)"}, "scale of module (root)"),
    ],
)
def test_what_a_step_sets_and_the_forward_reads_is_refused_by_name(
    tmp_path: Path, steps: dict[str, str], place: str
) -> None:
    with pytest.raises(InputError) as told:
        check(tmp_path, **steps)
    assert f"step sets {place}, which the forward or the loss reads" in told.value.found
    assert "buffer" in told.value.fix


@pytest.mark.parametrize(
    "steps",
    [
        {"stepped": "setattr(model, 'unread', 0.5)"},
        {"stepped": "model.heat.mul_(0.5)"},  # a buffer, whose number printed code reads
        {"scheduled": "Settings.unread = 1"},
    ],
)
def test_what_nobody_reads_or_is_a_buffer_may_be_set(tmp_path: Path, steps: dict[str, str]) -> None:
    check(tmp_path, **steps)
