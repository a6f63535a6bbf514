"""Stages of Hugging Face models compute what the models do, whatever their calls pass around."""

from __future__ import annotations

import copy

import pytest
import torch

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.modules import modules_of
from autopar.codegen.forward.split import split_graph
from autopar.planner.model_file import ModelFile
from autopar.planner.trace.build import checked_loss
from tests.codegen.forward.running import namespace, stage_modules, staged_loss, take_classes
from tests.planner.huggingface.families import FAMILIES
from tests.planner.subjects import family_graph, zoo_file

CHOSEN = ("GPT-2", "Llama", "Mistral", "BERT", "T5", "ViT", "SegFormer")


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_a_family_compute_its_loss(name: str, stages: int) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    torch.manual_seed(0)
    model = family.build_model().double().train()
    split = split_graph(family_graph(name), modules_of(model))
    layers = len(split.layers.layers)
    counts = [layers // stages] * (stages - 1)
    opened = open_split(split, [*counts, layers - sum(counts)])
    torch.manual_seed(1)
    batch = {
        key: value.double() if value.is_floating_point() else value
        for key, value in family.example_batch(4).items()
    }
    torch.manual_seed(2)  # dropout draws the same numbers in the same order
    expected = checked_loss(copy.deepcopy(model)(**batch))
    found = namespace(opened)
    take_classes(model, opened.classes, found)
    torch.manual_seed(2)
    loss = staged_loss(no_loss(), stage_modules(model, opened, found), opened, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def no_loss() -> ModelFile:
    """Return a model file without a loss of its own, as these models return theirs."""
    return zoo_file("llama.py")
