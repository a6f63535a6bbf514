"""Stages of Hugging Face models compute what the models do, whatever their calls pass around."""

from __future__ import annotations

import copy

import pytest
import torch

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import Modules, modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.model.model_file import ModelFile
from autopar.planner.trace.build import checked_loss
from tests.cells import cells
from tests.codegen.forward.running import namespace, stage_modules, staged_loss, use_classes
from tests.planner.huggingface.families import FAMILIES
from tests.planner.huggingface.family import Family
from tests.planner.subjects import family_graph, zoo_file

CHOSEN = ("GPT-2", "Llama", "Mistral", "BERT", "T5", "ViT", "SegFormer")


STAGES = [(name, count) for count in (2, 3) for name in CHOSEN]
STAND = [("GPT-2", 2), ("T5", 3)]


@pytest.mark.parametrize(("name", "stages"), cells(STAGES, STAND))
def test_stages_of_a_family_compute_its_loss(name: str, stages: int) -> None:
    check_loss(name, stages, opened=[])


@pytest.mark.parametrize("name", cells(CHOSEN, ("Llama", "T5", "ViT")))
def test_an_opened_root_and_its_layers_compute_the_loss_of_a_family(name: str) -> None:
    graph = family_graph(name)
    layers = {layer.call for layer in split_graph(graph, modules(name)).layers.layers}
    opened = check_loss(name, 1, opened=["", *sorted(layers & graph.calls.keys())])
    assert opened.stages[0].returns_loss  # as the result, an object, cannot be printed


@pytest.mark.parametrize("name", ["ViT", "Llama"])
def test_opened_attentions_take_the_mask_that_training_hands_them(name: str) -> None:
    """Which is none: where a model notices that it is traced it makes one, here it does not."""
    model = family_named(name).build_model().double()
    split = split_graph(family_graph(name), modules_of(model))
    calls = split.graph.calls
    attentions = [call for call, record in calls.items() if "Attention" in record.class_name]
    opened = open_split(split, [len(split.layers.layers)], opened=attentions)
    batch = float64_rows(name)
    expected = checked_loss(model(**batch))
    use_classes(model, opened.classes, namespace(opened))
    assert not any("attn_mask=" in cls.source for cls in opened.classes)
    torch.testing.assert_close(checked_loss(model(**batch)), expected, rtol=1e-12, atol=1e-12)


def check_loss(name: str, stages: int, *, opened: list[str]) -> OpenedSource:
    """Compare the loss of so many stages with that of the model."""
    torch.manual_seed(0)
    model = family_named(name).build_model().double().train()
    split = split_graph(family_graph(name), modules_of(model))
    layers = len(split.layers.layers)
    counts = [layers // stages] * (stages - 1)
    result = open_split(split, [*counts, layers - sum(counts)], opened=opened)
    torch.manual_seed(1)
    batch = float64_rows(name)
    torch.manual_seed(2)  # dropout draws the same numbers in the same order
    expected = checked_loss(copy.deepcopy(model)(**batch))
    found = namespace(result)
    use_classes(model, result.classes, found)
    torch.manual_seed(2)
    loss = staged_loss(no_loss(), stage_modules(model, result, found), result, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    return result


def float64_rows(name: str) -> dict[str, torch.Tensor]:
    """Return a batch of four rows."""
    return {
        key: value.double() if value.is_floating_point() else value
        for key, value in family_named(name).example_batch(4).items()
    }


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def modules(name: str) -> Modules:
    with torch.device("meta"):
        return modules_of(family_named(name).build_model())


def no_loss() -> ModelFile:
    """Return a model file without a loss of its own, as these models return theirs."""
    return zoo_file("llama.py")
