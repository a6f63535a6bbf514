"""How many targets of a batch count is read off the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.codegen.forward.targets import weighed_terms
from autopar.planner.trace import trace
from tests.codegen.forward.running import namespace, use_classes, zoo_modules
from tests.codegen.forward.small_models import Shifted, file_of
from tests.planner.subjects import zoo_graph

Count = Callable[[Mapping[str, Tensor]], Tensor]


def counting(name: str) -> Count:
    split = split_graph(zoo_graph(name), zoo_modules(name))
    found = namespace(open_split(split, [len(split.layers.layers)]))
    count: Count = found["valid_targets"]
    return count


def counting_in(make: Callable[[], nn.Module], *, width: int) -> Count:
    """Return what counts in a model of rows of so many tokens."""
    file = replace(
        file_of(make),
        example_batch=lambda rows: {"ids": torch.ones(rows, width, dtype=torch.int64)},
    )
    split = split_graph(trace(file), modules_of(file.build_model()))
    count: Count = namespace(open_split(split, [len(split.layers.layers)]))["valid_targets"]
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


class Written(nn.Module):
    """Writes its targets into a tensor that ignores all, after which some are ignored again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        targets = ids.new_zeros(ids.shape[0], 4).fill_(-100)
        targets[:, 1:-1] = ids[:, 2:]
        first = targets[:, 1]
        first[ids[:, 0] == 7] = -100
        return functional.cross_entropy(self.embed(ids).flatten(0, 1), targets.flatten())


def test_targets_that_are_written_into_a_tensor_count() -> None:
    assert counting_in(Written, width=4)({"ids": torch.tensor([[7, 3, 1, 4], [5, 3, 2, 1]])}) == 3


class Picking(nn.Module):
    """Learns from the places alone that a mask picks, one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        loss = functional.cross_entropy(x[ids > 2], ids[ids > 2])
        match self.way:
            case "a mask":
                loss = x[ids > 2].square().mean()
            case "places":
                rows, places = torch.where(ids > 2)
                loss = functional.l1_loss(x[rows, places], ids[rows, places, None].to(x.dtype))
            case "no zeros":
                loss = x[ids.nonzero(as_tuple=True)].mean()
        return loss


@pytest.mark.parametrize(
    ("way", "count"), [("a mask", 4), ("places", 4), ("no zeros", 5), ("targets", 4)]
)
def test_what_a_mask_picks_counts(way: str, count: int) -> None:
    assert (
        counting_in(lambda: Picking(way), width=3)({"ids": torch.tensor([[7, 3, 0], [5, 3, 2]])})
        == count
    )


class Moving(nn.Module):
    """Asks where its targets lie before it counts them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 2)
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        match self.way:
            case "masked by place":
                counts = (ids > 2).unsqueeze(-1) * (torch.stack([ids, ids % 4], -1) > 0)
                return (x * counts).sum() / counts.sum()
            case "in pairs":
                counts = ids.unsqueeze(2) > ids.unsqueeze(1)
                return (x.sum(-1).unsqueeze(1) * counts).sum() / counts.sum()
            case "behind a slice":
                scores = x.transpose(0, 1)[1:].repeat(1, 1, 4).flatten(0, 1)
                return functional.cross_entropy(scores, ids.t()[1:].flatten(), ignore_index=0)
        raise ValueError(self.way)


@pytest.mark.parametrize(
    ("way", "count"), [("masked by place", 5), ("in pairs", 6), ("behind a slice", 3)]
)
def test_targets_count_where_they_lie(way: str, count: int) -> None:
    assert (
        counting_in(lambda: Moving(way), width=3)({"ids": torch.tensor([[7, 3, 0], [0, 4, 2]])})
        == count
    )


class OfClasses(nn.Module):
    """Predicts the next token, of which some matter more than others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        weight = torch.tensor([0.3, 1.0, 0.5, 2.0], device=ids.device)
        return functional.cross_entropy(
            self.embed(ids).flatten(0, 1), ids.flatten() % 4, weight, ignore_index=0
        )


def test_targets_count_by_the_weights_of_their_classes() -> None:
    file = file_of(OfClasses)
    split = split_graph(trace(file), modules_of(file.build_model()))
    opened = open_split(split, [len(split.layers.layers)])
    assert opened.valid_targets is not None
    assert "torch.tensor([0.3, 1.0, 0.5, 2.0]" in opened.valid_targets
    found = namespace(opened)["valid_targets"]({"ids": torch.tensor([[7, 3, 0, 4], [7, 3, 2, 1]])})
    assert found == 4 * 2.0 + 0.5 + 1.0
    assert found.dtype is torch.float64


class TwoMeans(nn.Module):
    """Predicts the token and, from the first one, whether it is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.embed(ids)
        by_token = functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 4, ignore_index=0)
        return by_token + 0.5 * functional.cross_entropy(logits[:, 0], ids[:, 0] % 2)


def test_a_loss_of_several_means_counts_and_weighs_each() -> None:
    file = file_of(TwoMeans)
    split = split_graph(trace(file), modules_of(file.build_model()))
    terms = tuple(op.name for op in weighed_terms(split.graph))
    opened = open_split(replace(split, weighed=terms), [len(split.layers.layers)])
    found = namespace(opened)
    ids = torch.tensor([[7, 3, 0, 4], [7, 3, 2, 1]])
    assert found["valid_targets"]({"ids": ids}).tolist() == [6, 2]
    model = file.build_model()
    use_classes(model, [stage.cls for stage in opened.stages], found)
    weights = torch.tensor([3.0, 5.0])
    logits = model.embed(ids)
    by_token = functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 4, ignore_index=0)
    expected = 3 * by_token + 2.5 * functional.cross_entropy(logits[:, 0], ids[:, 0] % 2)
    torch.testing.assert_close(model(ids=ids, loss_weights=weights), expected)
