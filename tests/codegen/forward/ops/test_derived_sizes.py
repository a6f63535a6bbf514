"""A number that varies with lengths is printed as arithmetic that gives it in both traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.ops.sizes import Pair, ReadableSizes, derived
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.codegen.text.expressions import Binding, Fact, LocalTensor, rendered, text
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, split
from autopar.planner.graph.ops import Extent
from autopar.planner.rules.signature import leaves
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of

T, S = (12, 21), (7, 11)


def _name(_: LocalTensor | Fact) -> tuple[str, Binding]:
    raise AssertionError


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        pytest.param((12, 21), "t", id="a-length"),
        pytest.param((36, 63), "t * 3", id="a-multiple"),
        pytest.param((4, 7), "t // 3", id="a-part"),
        pytest.param((84, 231), "t * s", id="a-product"),
        pytest.param((288, 882), "t * t * 2", id="a-multiple-of-a-square"),
        pytest.param((6, 11), "(t + 1) // 2", id="a-part-rounded-up"),
        pytest.param((23, 41), "t * 2 - 1", id="a-multiple-less-one"),
        pytest.param((5, 10), "(t - 1) // 2", id="a-part-of-less"),
        pytest.param((12, 5), None, id="nothing-that-shrinks-as-lengths-grow"),
    ],
)
def test_the_simplest_arithmetic_that_gives_both_numbers_is_printed(
    number: Pair, printed: str | None
) -> None:
    found = derived(number, {T: text("t"), S: text("s")})
    assert (None if found is None else rendered(found, _name)[0]) == printed


class TwoLengths(nn.Module):
    """Embeds two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return torch.as_tensor(self.embed(labels).mean() + self.embed(ids).mean())


def of_lengths(ids: int, labels: int) -> Graph:
    def batch_of(rows: int) -> dict[str, Tensor]:
        lengths = {"ids": ids, "labels": labels}
        return {key: torch.zeros(rows, n, dtype=torch.long) for key, n in lengths.items()}

    return trace(replace(file_of(TwoLengths), example_batch=batch_of))


def test_a_length_is_asked_of_its_shards_before_another_length_is_taken_for_it() -> None:
    graph, other = of_lengths(10, 4), of_lengths(13, 5)
    known = split_graph(graph, modules_of(TwoLengths()), other=lambda: other)
    embedded = graph.ops[0].outputs[0]
    (axis,) = leaves(known.axes.dims[embedded][1])
    sizes = ReadableSizes(known, text("self.tensor"))
    sizes.add_argument(LocalTensor("ids", WHOLE))
    length = Extent.of(4), Extent.of(5)
    assert rendered(sizes.whole(*length), _named)[0] == "(ids.shape[1] + 2) // 3"
    sizes.add(LocalTensor(embedded, split(axis.name, 1)))
    assert rendered(sizes.whole(*length), _named)[0] == f"whole_length({embedded}, 1, self.tensor)"


def _named(piece: LocalTensor | Fact) -> tuple[str, Binding]:
    if isinstance(piece, LocalTensor):
        return piece.tensor, Binding.CALL
    return f"{piece.value.tensor}.{piece.what}", Binding.CALL
