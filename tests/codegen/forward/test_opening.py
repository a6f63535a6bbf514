"""Conversions stand in code that runs between the op that makes a tensor and those that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional

from autopar.codegen.forward.calls import LOSS, ROOT, call_tree
from autopar.codegen.forward.modules import modules_of
from autopar.codegen.forward.opening import open_calls
from autopar.codegen.forward.split import split_graph
from autopar.planner.layouts import REPLICATED, OpLayout, split
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of


class Echoing(nn.Module):
    """Gives each token's logits; the loss compares them with the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed(ids)
        return out


def echo_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), batch["ids"].flatten())


def test_what_the_loss_reads_as_well_is_converted_for_the_model_in_the_model() -> None:
    graph = trace(replace(file_of(Echoing), loss=echo_loss))
    (embedding,) = (op for op in graph.ops if op.target == "aten.embedding.default")
    by_place = split("seq", 1)
    layout = OpLayout(letter="…", axis="seq", needs=(REPLICATED, by_place), gives=(by_place,))
    changed = replace(
        split_graph(graph, modules_of(Echoing())),
        degree=2,
        ops=MappingProxyType({embedding.name: layout}),
        gives=MappingProxyType({embedding.outputs[0]: by_place}),
    )
    opening = open_calls(changed, call_tree(graph), opened=[LOSS])
    assert opening.places[embedding.name, "ids", by_place] == ROOT
