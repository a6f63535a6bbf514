"""Conversions stand in code that runs between the op that makes a tensor and those that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.codegen.forward.opening import has_split_row_count, is_changed
from autopar.codegen.forward.opening.opener import open_calls
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, call_tree
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import SplitGraph, split_graph
from autopar.planner.graph.layouts import REPLICATED, WHOLE, Layout, OpLayout, split
from autopar.planner.graph.ops import Op
from autopar.planner.rules.signature import leaves
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


def laid_out(plain: SplitGraph, layouts: Mapping[Op, OpLayout], **held: Layout) -> SplitGraph:
    """Return a graph on two ranks with the layouts of some ops, and those in which weights lie."""
    made = {op.outputs[0]: layout.gives[0] for op, layout in layouts.items()}
    ops = {op.name: layout for op, layout in layouts.items()}
    return replace(
        plain, degree=2, ops=MappingProxyType(ops), gives=MappingProxyType({**made, **held})
    )


def echo_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), batch["ids"].flatten())


def test_what_the_loss_reads_as_well_is_converted_for_the_model_in_the_model() -> None:
    graph = trace(replace(file_of(Echoing), loss=echo_loss))
    (embedding,) = (op for op in graph.ops if op.target == "aten.embedding.default")
    by_place = split("seq", 1)
    layout = OpLayout(letter="…", axis="seq", needs=(REPLICATED, by_place), gives=(by_place,))
    changed = laid_out(split_graph(graph, modules_of(Echoing())), {embedding: layout})
    opening = open_calls(changed, call_tree(graph), opened=[LOSS])
    assert opening.places[embedding.name, "ids", by_place] == ROOT


class Masking(nn.Module):
    """Leaves a mask out that hides nothing, which a trace cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Masked(), Masked()])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of what the blocks make."""
        hides = not torch.compiler.is_exporting() and bool((x > 0).all())
        for block in self.blocks:
            x = block(x, None if hides else x > 0)
        return x.mean()


class Masked(nn.Module):
    """Multiplies, if by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return a product."""
        wide: Tensor = self.wide(x)
        return wide if mask is None else wide * mask


def test_all_code_around_opened_code_is_opened_where_a_model_noticed_its_trace() -> None:
    file = replace(file_of(Masking), example_batch=lambda rows: {"x": torch.ones(rows, 4)})
    graph = trace(file)
    assert graph.was_noticed
    split_by_none = split_graph(graph, modules_of(Masking()))
    opening = open_calls(split_by_none, call_tree(graph), opened=["blocks.1"])
    assert opening.opened == {ROOT, "blocks.1"}


class Mixing(nn.Module):
    """Where a rank has some places at first, and all of them in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.tanh()


class Viewing(nn.Module):
    """Reads the number of places from what it is given, and shapes what was made of all."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = Mixing()

    def forward(self, x: Tensor) -> Tensor:
        _, places, _ = x.shape
        out: Tensor = self.mixing(x).view(-1, places, 2, 4)
        return out


class Counting(Viewing):
    """Numbers the places."""

    def forward(self, x: Tensor) -> Tensor:
        _, places, _ = x.shape
        return torch.as_tensor(self.mixing(x) * torch.arange(places)[:, None])


class Viewed(nn.Module):
    """Embeds, and has that mixed and viewed, or counted."""

    def __init__(self, viewing: type[Viewing] = Viewing) -> None:
        super().__init__()
        self.embed, self.viewing = nn.Embedding(8, 8), viewing()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.viewing(self.embed(ids))
        return out.mean()


@pytest.mark.parametrize("kind", [Viewing, Counting])
def test_a_module_that_shapes_whole_what_it_was_given_in_part_is_opened(
    kind: type[Viewing],
) -> None:
    graph = trace(file_of(partial(Viewed, kind)))
    plain = split_graph(graph, modules_of(Viewed(kind)))
    embedding, linear, tanh, *rest = graph.ops[:-1]
    (axis,) = leaves(plain.axes.dims[embedding.outputs[0]][1])
    by_place = split(axis.name, 1)
    whole = OpLayout(letter="", axis="", needs=(REPLICATED,), gives=(REPLICATED,))
    layouts = {
        embedding: replace(whole, needs=(REPLICATED, by_place), gives=(by_place,)),
        linear: replace(whole, needs=(by_place, REPLICATED, REPLICATED), gives=(by_place,)),
        tanh: whole,
        **{op: replace(whole, needs=(REPLICATED,) * len(op.inputs)) for op in rest},
    }
    changed = laid_out(plain, layouts)
    opened = open_calls(changed, call_tree(graph), opened=[]).opened
    assert "viewing.mixing" in opened  # that gathers
    assert "viewing" in opened


class Halving(nn.Module):
    """Computes with a number that is no size."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Dividing(nn.Module):
    """Computes with the number of places."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class DividingByFeatures(nn.Module):
    """Computes with the number of features."""

    def forward(self, x: Tensor) -> Tensor:
        _, _, features = x.shape
        return x / features


class DividingRenamed(nn.Module):
    """Computes with a number of places that its source does not show to be the argument's."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        return y / y.shape[1]


class DividingByRows(nn.Module):
    """Computes with the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class Shaping(nn.Module):
    """Tells a view the rows of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, 2, 4)


class Divided(nn.Module):
    """Embeds, and has that divided."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.dividing = nn.Embedding(8, 8), kind()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dividing(self.embed(ids))
        return out.mean()


@pytest.mark.parametrize(
    ("kind", "dim", "is_opened"),
    [
        (Halving, 1, False),
        (Halving, 0, False),
        (Dividing, 1, True),
        (Dividing, 0, False),  # no number of its trace can be that of the rows
        (Dividing, 2, False),
        (DividingByFeatures, 1, False),
        (DividingByFeatures, 2, True),
        (DividingRenamed, 1, True),
        (DividingRenamed, 2, True),  # it might be
        (DividingByRows, 0, True),
        (Shaping, 0, False),  # of the rank's rows, as it should
    ],
)
def test_a_module_that_computes_with_a_size_is_opened_where_a_rank_has_a_part(
    kind: type[nn.Module], dim: int, *, is_opened: bool
) -> None:
    graph = trace(file_of(partial(Divided, kind)))
    plain = split_graph(graph, modules_of(Divided(kind)))
    embedding, division, mean = graph.ops
    (axis,) = leaves(plain.axes.dims[embedding.outputs[0]][dim])
    part = split(axis.name, dim)
    whole = OpLayout(letter="", axis="", needs=(REPLICATED,), gives=(REPLICATED,))
    layouts = {
        embedding: replace(whole, needs=(REPLICATED, part), gives=(part,)),
        division: replace(whole, needs=(part,), gives=(part,)),
        mean: whole,
    }
    changed = laid_out(plain, layouts)
    opened = open_calls(changed, call_tree(graph), opened=[]).opened
    assert ("dividing" in opened) == is_opened


class Turning(nn.Module):
    """Computes with the size of a dim that has become another one's by an op in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.transpose_(1, 2)
        return x / x.shape[1]


@pytest.mark.parametrize("dim", [1, 2])
def test_an_op_in_place_may_exchange_the_dims_of_an_argument(dim: int) -> None:
    graph = trace(file_of(partial(Divided, Turning)))
    plain = split_graph(graph, modules_of(Divided(Turning)))
    embedding, transpose, division, mean = graph.ops
    (axis,) = leaves(plain.axes.dims[embedding.outputs[0]][dim])
    part, turned = split(axis.name, dim), split(axis.name, 3 - dim)
    whole = OpLayout(letter="", axis="", needs=(REPLICATED,), gives=(REPLICATED,))
    layouts = {
        embedding: replace(whole, needs=(REPLICATED, part), gives=(part,)),
        transpose: replace(whole, needs=(part,), gives=(turned,)),
        division: replace(whole, needs=(turned,), gives=(turned,)),
        mean: whole,
    }
    opened = open_calls(laid_out(plain, layouts), call_tree(graph)).opened
    assert "dividing" in opened


class Repeating(nn.Module):
    """Repeats a start over the rows, and over four places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.start = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, ids: Tensor) -> Tensor:
        start = self.start.repeat(len(ids), 4, 1)
        out: Tensor = self.embed(ids).mean(dim=1, keepdim=True) + start
        return out.mean()


@pytest.mark.parametrize(("dim", "is_of_rows"), [(0, True), (1, False)])
def test_a_repetition_that_is_split_is_told_another_number(dim: int, *, is_of_rows: bool) -> None:
    graph = trace(file_of(Repeating))
    plain = split_graph(graph, modules_of(Repeating()))
    (repeat,) = (op for op in graph.ops if op.target == "aten.repeat.default")
    axis, *_ = leaves(plain.axes.dims[repeat.outputs[0]][dim])
    part = split(axis.name, dim)
    layout = OpLayout(letter="", axis=axis.name, needs=(REPLICATED,), gives=(part,))
    changed = laid_out(plain, {repeat: layout}, start=REPLICATED)
    assert has_split_row_count(repeat, changed) == is_of_rows
    assert is_changed(repeat, changed) != is_of_rows


class Looping(nn.Module):
    """Runs a gate for each place, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean of what the head makes of the last place."""
        state = torch.zeros_like(self.embed(ids)[:, 0])
        for place in range(3):
            state = torch.tanh(self.gate(state) + self.embed(ids[:, place]))
        return torch.as_tensor(self.head(state).mean())


class LoopingOverPlaces(Looping):
    """Reads the number of places, and computes with a number."""

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros_like(self.embed(ids)[:, 0])
        for place in range(ids.shape[1]):
            state = 1 - torch.tanh(self.gate(state) + self.embed(ids[:, place]))
        return torch.as_tensor(self.head(state).mean())


@pytest.mark.parametrize(
    ("kind", "weight", "opened"),
    [
        (Looping, "head.0.weight", {"head"}),
        (Looping, "gate.weight", {"gate", "gate@1", "gate@2"}),
        (LoopingOverPlaces, "head.0.weight", {"head"}),
    ],
)
def test_a_loop_stays_in_the_authors_code_if_a_module_that_it_calls_can_be_opened(
    kind: type[Looping], weight: str, opened: set[str]
) -> None:
    file = replace(
        file_of(kind), example_batch=lambda rows: {"ids": torch.zeros(rows, 3, dtype=torch.long)}
    )
    plain = split_graph(trace(file), modules_of(kind()))
    whole, shard = WHOLE, split("features", 1)
    products = [op for op in plain.graph.ops if weight in op.inputs]
    layouts = {
        op: OpLayout(
            letter="…", axis="features", needs=(whole, split("features", 0), whole), gives=(shard,)
        )
        for op in products
    }
    opening = open_calls(laid_out(plain, layouts), call_tree(plain.graph))
    assert opening.opened == opened


def test_a_loop_is_printed_if_its_own_lines_change() -> None:
    file = replace(
        file_of(Looping), example_batch=lambda rows: {"ids": torch.zeros(rows, 3, dtype=torch.long)}
    )
    plain = split_graph(trace(file), modules_of(Looping()))
    shard = split("features", 1)
    layouts = {
        op: OpLayout(letter="…", axis="features", needs=(shard,), gives=(shard,))
        for op in plain.graph.ops
        if op.target == "aten.tanh.default"
    }
    opening = open_calls(laid_out(plain, layouts), call_tree(plain.graph))
    assert opening.opened == {ROOT}
