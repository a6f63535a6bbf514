"""Printed code calls values what the author of the model calls them."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.reading.author_names import author_names, parsed, unpacked
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.trace import trace
from tests.codegen.forward.running import namespace, use_classes
from tests.codegen.forward.small_models import file_of


def spread(x: Tensor) -> Tensor:
    """Return how far numbers are from their mean."""
    centred = x - x.mean(-1, keepdim=True)
    return centred.square() + centred.abs()


class Inner(nn.Module):
    """Is given two tensors in one."""

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cosines, sines = angles
        return x * cosines + x * sines + x * cosines * sines


class Spoken(nn.Module):
    """Has words for what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = Inner()
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        features = ids.float() / 3
        distance = spread(features)
        gather = features.tanh()  # as a function that scripts import
        l = gather * gather  # noqa: E741
        first = self.norm(features[:2] * distance[:2])
        angles = (l.cos(), l.sin())
        turned = self.inner(features, angles)
        total = (turned + distance + gather + angles[0] - angles[1]).sum() + first.mean()
        out: Tensor = self.out(total.expand(4))
        return out.square().sum()


def printed(model: nn.Module, *, opened: list[str]) -> dict[str, str]:
    """Return the printed classes of a model, having compared what they compute with its own."""
    split = split_graph(trace(file_of(type(model))), modules_of(model))
    found = open_split(split, [len(split.layers.layers)], opened=opened)
    copied = copy.deepcopy(model)
    classes = [*found.classes, *(stage.cls for stage in found.stages)]
    use_classes(copied, classes, namespace(found))
    ids = torch.arange(8).reshape(2, 4)
    torch.testing.assert_close(copied(ids), model(ids), rtol=0, atol=0)
    return {cls.name: cls.source for cls in classes}


def test_values_are_called_what_a_statement_calls_them() -> None:
    source = "\n".join(printed(Spoken(), opened=[""]).values())
    assert "features = " in source
    assert "distance = " in source  # what a function returns


def test_names_that_scripts_need_themselves_are_not_taken() -> None:
    source = "\n".join(printed(Spoken(), opened=[""]).values())
    assert "gather = " not in source
    assert "    l = " not in source


def test_what_goes_into_a_module_is_not_called_what_comes_out() -> None:
    graph = trace(file_of(Spoken))
    made = {name: op for op in graph.ops for name in op.outputs}
    named = {
        name: made[tensor].target.split(".")[1]
        for tensor, given in author_names(graph).items()
        for _, name in given
    }
    assert {"features", "distance", "total"} <= named.keys()
    assert named["first"] == "layer_norm"
    assert named["out"] == "linear"


class Writing(nn.Module):
    """Sets variables in every way that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        query, key = (part(x).sin() for part in self.parts)
        weights, places = (query * key).topk(2)
        largest = key.max(dim=-1).indices
        scores = (
            self.mixed(query, scale=key.exp())
            .softmax(-1)
        )  # fmt: skip
        halves = scores.chunk(2, dim=-1)
        left, right = halves
        first, second = left.cos(), right.sin()
        scores += (shift := first.mean()) * 2
        x = self.block(scores)
        for _ in range(2):
            x = x.tan()
        total: Tensor = x.sum() + weights.sum() + places.sum() + largest.sum() + second.sum()
        return total + shift

    def mixed(self, query: Tensor, *, scale: Tensor) -> Tensor:
        product = query * scale
        return product / product.abs().amax()


def test_every_way_to_set_a_variable_gives_its_name_to_the_value_alone() -> None:
    graph = trace(file_of(Writing))
    made = {name: op for op in graph.ops for name in op.outputs}
    named: dict[str, set[str]] = {}
    for tensor, given in author_names(graph).items():
        for _, name in given:
            op = made[tensor]
            named.setdefault(name, set()).add(
                f"{op.target.split('.')[1]}{op.outputs.index(tensor)}"
            )
    assert named == {
        "x": {"to0", "tanh0", "tan0"},
        "query": {"sin0"}, "key": {"sin0"},
        "weights": {"topk0"}, "places": {"topk1"}, "largest": {"max1"},
        "scale": {"exp0"}, "product": {"mul0"},
        "scores": {"softmax0", "add_0"},
        "left": {"chunk0"}, "right": {"chunk1"},
        "total": {"add0"}, "first": {"cos0"}, "second": {"sin0"}, "shift": {"mean0"},
    }  # fmt: skip


def test_what_a_forward_unpacks_is_called_as_it_does() -> None:
    sources = printed(Spoken(), opened=["", "inner"])
    inner = next(source for source in sources.values() if "Inner" in source.splitlines()[0])
    assert "cosines, sines = angles" in inner
    spoken = next(source for source in sources.values() if "Spoken" in source.splitlines()[0])
    assert "(cosines, sines)" in spoken


class Passing(nn.Module):
    """Hands on what it is given, as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        inner: Tensor = self.inner(x, angles)
        return inner * 2


class Handing(nn.Module):
    """Gives two tensors to a module that hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.passing = Passing()
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        out: Tensor = self.out(self.passing(x, (x.cos(), x.sin())))
        return out.square().mean()


def test_a_container_is_handed_on_as_it_came() -> None:
    sources = printed(Handing(), opened=["", "passing"])
    passing = next(source for source in sources.values() if "Passing" in source.splitlines()[0])
    assert "self.inner(x, angles)" in passing
    assert "= angles" not in passing


class Renaming(Passing):
    """Uses the name of what it is given for something else, and hands it on afterwards."""

    def forward(self, x: Tensor, angles: Any) -> Tensor:
        cosines, sines = angles
        before = (cosines, sines)
        angles = torch.add(cosines, sines)
        inner: Tensor = self.inner(x, before)
        out: Tensor = inner * angles + x * angles
        return out


class Reusing(Handing):
    """Gives two tensors to a module that calls something else as it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.passing = Renaming()


def test_a_variable_does_not_take_the_name_of_what_is_handed_on() -> None:
    sources = printed(Reusing(), opened=["", "passing"])
    renaming = next(source for source in sources.values() if "Renaming" in source.splitlines()[0])
    assert "self.inner(x, angles)" in renaming
    assert " angles = " not in renaming


def _elsewhere(file: str) -> str:
    return re.sub(r"^.*(/forward/reading/)", r"/elsewhere\1", file)


def test_names_stay_what_they_are_where_a_project_has_moved() -> None:
    graph = trace(file_of(Spoken))
    moved = [
        replace(op, spans=tuple(span._replace(file=_elsewhere(span.file)) for span in op.spans))
        for op in graph.ops
    ]
    assert any(op.location.startswith("/elsewhere/") for op in moved)
    alone = replace(graph, calls={}, functions=())  # their places have not moved
    there = replace(alone, ops=tuple(replace(op, call="(loss)") for op in moved))
    here = replace(alone, ops=tuple(replace(op, call="(loss)") for op in graph.ops))
    assert author_names(there) == author_names(here) != {}


def test_variables_that_are_unpacked_are_found_in_source_alone() -> None:
    source = "    def forward(self, x):\n        a, (b, c) = x\n        d, _ = y\n"
    assert unpacked(parsed(source)) == {"x": ("a", ""), "y": ("d", "")}
    assert unpacked(parsed("lambda x: (")) == {}


class Scaling(nn.Module):
    """Scales by numbers that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.heads = 8, 2
        self.inner = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(ids.float().unsqueeze(-1) * torch.ones(8)) * (self.dim / self.heads) ** -0.5
        scale = 1.0 / self.dim**0.5
        x = (x * x.shape[-1] ** -0.5).softmax(-1) * scale / math.sqrt(self.dim)
        return torch.as_tensor(x.sum())


def test_a_number_is_written_as_the_author_computes_it() -> None:
    (source,) = printed(Scaling(), opened=[""]).values()
    assert "* (self.dim / self.heads) ** -0.5" in source
    assert "x * x.shape[-1] ** -0.5" in source
    assert "* (1.0 / self.dim**0.5) / math.sqrt(self.dim)" in source


class Attending(nn.Module):
    """Reads a size of a value that is not beside the number, and takes parts by an index."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(1, 1, 6, 6).tril())

    def forward(self, ids: Tensor) -> Tensor:
        _, places = ids.shape
        x = self.inner(ids.float().unsqueeze(-1) * torch.ones(8))
        q = x[:, None]
        k = x[:, None, :, :]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores * self.mask[:, :, :places, :places]
        last = scores[:, :, 1:, -1]
        return torch.as_tensor(last.sum())


def test_sizes_and_indices_are_written_as_the_author_has_them() -> None:
    (source,) = printed(Attending(), opened=[""]).values()
    assert "* (1.0 / math.sqrt(k.shape[-1]))" in source
    assert "self.mask[:, :, :4, :4]" in source
    assert source.count("[:, None]") == 2
    assert source.count("unsqueeze(") == 1
