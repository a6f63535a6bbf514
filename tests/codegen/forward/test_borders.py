"""Code of their own lets calls give and take what they do without it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.errors import InputError
from autopar.planner.trace import trace
from tests.codegen.forward.running import namespace, use_classes
from tests.codegen.forward.small_models import (
    Keying,
    Listing,
    Numbering,
    Repeating,
    Resetting,
    Turning,
    file_of,
)

IDS = torch.arange(8).reshape(2, 4)


def printed(kind: Callable[[], nn.Module], calls: list[str]) -> tuple[nn.Module, nn.Module]:
    """Return a model, and a copy some of whose calls have printed code."""
    model = kind()
    split = split_graph(trace(file_of(kind)), modules_of(model))
    opened = open_split(split, [len(split.layers.layers)], opened=calls)
    changed = copy.deepcopy(model)
    classes = (*opened.classes, *(stage.cls for stage in opened.stages))
    assert classes
    use_classes(changed, classes, namespace(opened))
    return model, changed


def learned(model: nn.Module) -> list[Tensor]:
    """Return the loss of a batch and its gradients."""
    loss = model(ids=IDS)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("calls", [["first"], ["first", "second"], ["", "first", "second"]])
def test_a_list_is_given_as_a_list(calls: list[str]) -> None:
    model, changed = printed(Listing, calls)
    torch.testing.assert_close(learned(changed), learned(model))


@pytest.mark.parametrize("calls", [[""], ["first"], ["first", "second"], ["", "second"]])
def test_a_dict_is_given_and_taken_as_a_dict(calls: list[str]) -> None:
    model, changed = printed(Keying, calls)
    torch.testing.assert_close(learned(changed), learned(model))


def test_parts_of_what_a_dict_of_keywords_has_get_names() -> None:
    model, changed = printed(Turning, ["first"])
    torch.testing.assert_close(learned(changed), learned(model))


def test_a_tensor_of_more_numbers_than_a_script_should_have_is_refused() -> None:
    with pytest.raises(InputError, match="more than 64 numbers") as told:
        printed(Numbering, [""])
    assert "small_models.py" in told.value.where
    assert "register_buffer" in told.value.fix


def test_what_every_turn_of_a_loop_reads_keeps_its_name() -> None:
    model, changed = printed(Repeating, [""])
    torch.testing.assert_close(learned(changed), learned(model))


def test_what_keeps_state_begins_anew_where_its_caller_no_longer_resets_it() -> None:
    model, changed = printed(Resetting, [""])
    for _ in range(2):
        torch.testing.assert_close(learned(changed), learned(model))


class Chained(nn.Sequential):
    """A model that is a list of its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 4), *(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids).square().mean()  # type: ignore[no-untyped-call]
        return out


def test_a_stage_of_a_model_that_is_a_list_runs_its_own_layers_alone() -> None:
    model = Chained()
    split = split_graph(trace(file_of(Chained)), modules_of(model))
    count = len(split.layers.layers)
    opened = open_split(split, [count - 2, 2])
    first, last = (copy.deepcopy(model) for _ in range(2))
    for part, stage in zip((first, last), opened.stages, strict=True):
        use_classes(part, [stage.cls], namespace(opened))
        for key, value in stage.bounds:
            setattr(part, key, value)
    crossing = first(ids=IDS)
    torch.testing.assert_close(last(crossing, ids=IDS), model(IDS))
