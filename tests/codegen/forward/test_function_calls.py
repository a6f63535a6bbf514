"""Printed code calls the functions of the model's files where they compute what they did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.codegen.emit import emit
from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.codegen.forward.reading.test_author_names import printed
from tests.codegen.forward.small_models import file_of
from tests.codegen.plans import plan_for


def table(length: int, like: Tensor, *, base: float) -> tuple[Tensor, Tensor]:
    angles = base ** torch.arange(length, device=like.device)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    return x * angles[0] + halved(x) * angles[1]


def halved(x: Tensor) -> Tensor:
    return x / 2


def noisy(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).normal_()


def filled(x: Tensor) -> Tensor:
    return x.mul_(2)


class Turning(nn.Module):
    """Calls functions of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        x = turned(halved(x), table(x.shape[1], x, base=0.5))
        x = filled(x + 1)
        out: Tensor = self.out(x).square().sum()
        return out


def half_learned(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax()
    return x * scale


class Frozen(Turning):
    """Calls a function without gradients, then one of which a part has gradients."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = halved(self.out.weight * ids.float())
        return torch.as_tensor(half_learned(self.out(x)).square().sum())


class Drawing(Turning):
    """Draws in a function."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(noisy(halved(ids.float()))).square().sum()
        return out


def test_a_function_is_called_with_what_the_model_gives_it() -> None:
    (source,) = printed(Turning(), opened=[""]).values()
    assert "table(4, x, base=0.5)" in source or "table(ids.shape[1], x, base=0.5)" in source
    assert "turned(halved(x), (" in source
    assert source.count("halved(") == 1  # the other call is in turned()


def test_a_function_is_called_without_gradients_as_in_the_model() -> None:
    (source,) = printed(Frozen(), opened=[""]).values()
    assert "with torch.no_grad():\n            x = halved(" in source
    assert "half_learned(" not in source


def test_a_function_that_draws_or_writes_is_printed() -> None:
    (source,) = printed(Turning(), opened=[""]).values()
    assert "filled(" not in source
    split = split_graph(trace(file_of(Drawing)), modules_of(Drawing()))
    found = open_split(split, [len(split.layers.layers)], opened=[""])
    (stage,) = found.stages
    assert "noisy(" not in stage.cls.source
    assert "halved(" in stage.cls.source
    assert [one.name for one in found.functions] == ["halved"]


def gather(x: Tensor) -> Tensor:
    return x * 3


class Gathering(Drawing):
    """Calls a function that is named as one of those that move tensors between ranks."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(gather(halved(ids.float()))).square().sum()
        return out


def test_a_function_that_a_script_has_another_one_of_is_printed() -> None:
    split = split_graph(trace(file_of(Gathering)), modules_of(Gathering()))
    found = open_split(split, [len(split.layers.layers)], opened=[""])
    assert [one.name for one in found.functions] == ["halved"]
    assert "gather(" not in found.stages[0].cls.source


def test_what_is_no_number_is_handed_to_no_function() -> None:
    """A plan file that names another text as an argument reaches no function of the model's."""
    graph = trace(file_of(Turning))
    told = tuple(replace(one, keywords=(("path", "/"),)) for one in graph.functions)
    split = split_graph(replace(graph, functions=told), modules_of(Turning()))
    (stage,) = open_split(split, [len(split.layers.layers)], opened=[""]).stages
    assert not any(f"{name}(" in stage.cls.source for name in ("table", "turned", "halved"))


SPLIT = """import torch
import torch.nn.functional as F
from torch import nn


def scaled(x):
    return x * 0.5


def shared(x):
    return x / x.shape[-1]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(shared(scaled(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x):
        x = self.first(x)
        return {"guess": self.second(x), "before": x}


def build_model():
    return Model()


def example_batch(n):
    return {"x": torch.randn(n, 8, 64), "y": torch.randn(n, 8, 64)}


def loss(outputs, batch):
    return F.mse_loss(outputs["guess"], batch["y"]) + outputs["before"].square().mean()
"""


def test_a_function_is_called_on_a_part_only_if_it_cannot_mistake_its_size(tmp_path: Path) -> None:
    path = tmp_path / "split.py"
    path.write_text(SPLIT, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=(1, 1, 2), split=("256",))
    script = emit(plan, destination=tmp_path / "train.py")
    assert "scaled(self.up(" in script
    assert "shared(" not in script


def test_the_loss_of_the_model_file_is_called_by_the_last_stage(tmp_path: Path) -> None:
    path = tmp_path / "staged.py"
    path.write_text(SPLIT, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=(2, 1, 1))
    script = emit(plan, destination=tmp_path / "train.py")
    assert 'compute_loss({"guess": self.second(z), "before": z}, {"x": x, "y": y})' in script
