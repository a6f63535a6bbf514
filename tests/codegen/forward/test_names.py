"""No name of the user's becomes code."""

from __future__ import annotations

import copy

import pytest
import torch

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.codegen.text.expressions import identifier
from autopar.planner.trace import trace
from tests.codegen.forward.running import namespace, use_classes
from tests.codegen.forward.small_models import Hostile, file_of


def test_hostile_names_of_modules_and_parameters_stay_names() -> None:
    file = file_of(Hostile)
    model = Hostile()
    split = split_graph(trace(file), modules_of(model))
    opened = open_split(split, [len(split.layers.layers)], opened=[""])
    printed = copy.deepcopy(model)
    use_classes(printed, [stage.cls for stage in opened.stages], namespace(opened))
    ids = torch.arange(8).reshape(2, 4)
    torch.testing.assert_close(printed(ids), model(ids), rtol=0, atol=0)


@pytest.mark.parametrize("word", ["class", "match", "import", "1st", ""])
def test_words_that_python_keeps_are_changed(word: str) -> None:
    assert identifier(word) != word
