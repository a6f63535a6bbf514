"""Models that are built without memory: nothing is filled, and what torch refuses is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.planner.errors import InputError
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.model.without_memory import without_memory

SOURCE = """
import torch
from torch import nn

def build_model():
    {lines}

def example_batch(batch_size):
    return {{"x": torch.ones(batch_size, 4)}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], ModelFile]:
    def written(lines: str) -> ModelFile:
        path = tmp_path / "model.py"
        path.write_text(SOURCE.format(lines=lines.strip().replace("\n", "\n    ")))
        return load_model_file(str(path))

    return written


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_layers_have_sizes_and_no_numbers(file: Any) -> None:
    model = without_memory(file("return nn.Linear(4, 8)"))
    assert [tuple(one.shape) for one in _tensors(model)] == [(8, 4), (8,)]
    assert all(one.is_meta for one in _tensors(model))


def test_what_hangs_on_a_model_has_no_numbers(file: Any) -> None:
    lines = """
model = nn.Linear(4, 4)
model.plain = torch.ones(2)
model.listed = [torch.tensor([1.0]), {"a": torch.from_numpy(torch.ones(3).numpy())}]
model.hidden = (nn.Linear(2, 2),)
return model"""
    model: Any = without_memory(file(lines))
    held = [model.plain, model.listed[0], model.listed[1]["a"], model.hidden[0].weight]
    assert all(one.is_meta for one in held)
    assert isinstance(held[-1], nn.Parameter)


def test_what_the_constructor_reads_is_right(file: Any) -> None:
    lines = """
model = nn.Linear(4, 4)
model.rates = [float(rate) for rate in torch.linspace(0, 1, 3)]
model.seen = model.weight.is_meta, str(model.weight.device)
with torch.device("meta"):
    model.unseen = torch.ones(1).is_meta
return model"""
    model: Any = without_memory(file(lines))
    assert (model.rates, model.seen, model.unseen) == ([0, 0.5, 1], (False, "cpu"), True)


def test_what_a_recording_cannot_follow_is_built_for_real(file: Any) -> None:
    lines = """
model = nn.Linear(4, 4)
model.weight.untyped_storage().resize_(400)
return model"""
    assert all(one.is_meta for one in _tensors(without_memory(file(lines))))


@pytest.mark.parametrize(
    "line", ["torch.ones(3, requires_grad=True).normal_()", "torch.ones(3).long().normal_()"]
)
def test_what_torch_refuses_is_refused(file: Any, line: str) -> None:
    with pytest.raises(InputError, match="calling build_model failed"):
        without_memory(file(f"{line}\nreturn nn.Linear(4, 4)"))


def test_caches_keep_their_numbers(file: Any) -> None:
    lines = """
global TABLE
model = nn.Linear(4, 4)
TABLE = model.table = torch.arange(3.0).sqrt()
return model"""
    given = file(lines)
    model: Any = without_memory(given)
    table = given.build_model.__wrapped__.__globals__["TABLE"]
    assert model.table.is_meta
    assert torch.equal(table, torch.arange(3.0).sqrt())


SHARING = {
    "tied by data": "model[1].weight.data = model[0].weight.data",
    "a view as a buffer": "model.register_buffer('rows', model[0].weight.detach()[:2])",
    "a view in a list": "model.rows = [model[0].weight.data[1]]",
    "a flat vector": "model[1].bias = nn.Parameter(model[0].weight.detach()[0])",
}
APART = {
    "tied": "model[1].weight = model[0].weight",
    "held again": "model.again = [model[0].weight]",
    "copied": "model.register_buffer('rows', model[0].weight.detach()[:2].clone())",
    "cut from one vector": "flat = torch.zeros(20)\n"
    "model[0].weight.data, model[0].bias.data = flat[:16].view(4, 4), flat[16:]",
    "columns of one table": "table = torch.zeros(4, 8)\n"
    "model[0].weight.data, model[1].weight.data = table[:, :4], table[:, 4:]",
}


def _two_layers(line: str) -> str:
    return f"model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n{line}\nreturn model"


@pytest.mark.parametrize("way", SHARING)
def test_what_lies_in_the_memory_of_a_parameter_is_refused(file: Any, way: str) -> None:
    with pytest.raises(InputError, match=r"lies in the memory of the parameter \d\.weight") as told:
        without_memory(file(_two_layers(SHARING[way])))
    assert "decoder.weight = encoder.weight" in str(told.value)


@pytest.mark.parametrize("way", APART)
def test_tensors_that_are_one_or_lie_apart_are_not_refused(file: Any, way: str) -> None:
    without_memory(file(_two_layers(APART[way])))
