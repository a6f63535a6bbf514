"""How many targets of a batch count is read off the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.modules import modules_of
from autopar.codegen.forward.split import split_graph
from autopar.planner.trace import trace
from tests.codegen.forward.running import namespace, zoo_modules
from tests.codegen.forward.small_models import Shifted, file_of
from tests.planner.subjects import zoo_graph


def counting(name: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    split = split_graph(zoo_graph(name), zoo_modules(name))
    found = namespace(open_split(split, [len(split.layers.layers)]))
    count: Callable[[Mapping[str, Tensor]], Tensor] = found["valid_targets"]
    return count


@pytest.mark.parametrize("name", ["gpt2.py", "llama.py", "bert.py", "t5.py"])
def test_ignored_targets_do_not_count(name: str) -> None:
    labels = torch.tensor([[1, 2, -100], [-100, -100, 5]])
    assert counting(name)({"labels": labels}) == 3


def test_targets_that_the_model_shifts_are_counted_behind_the_shift() -> None:
    file = file_of(Shifted)
    graph = trace(file)
    with torch.device("meta"):
        modules: nn.Module = file.build_model()
    split = split_graph(graph, modules_of(modules))
    opened = open_split(split, [len(split.layers.layers)])
    count = namespace(opened)["valid_targets"]
    batch = {"ids": torch.tensor([[7, 3, 0, 0], [7, 3, 2, 1]])}
    assert count(batch) == (batch["ids"][:, 1:] != 0).sum() == 4
