"""Opened forwards compute what the originals do, on one process."""

from __future__ import annotations

import copy

import pytest

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.split import split_graph
from tests.codegen.forward.running import (
    assert_same,
    float64_batch,
    loss_of,
    namespace,
    original,
    result,
    use_classes,
    zoo_modules,
)
from tests.planner.subjects import ZOO_MODELS, zoo_file, zoo_graph


def opened_by_force(name: str, calls: list[str]) -> OpenedSource:
    """Open calls of a zoo model that nothing splits."""
    split = split_graph(zoo_graph(name), zoo_modules(name))
    return open_split(split, [len(split.layers.layers)], opened=calls)


def check_equal(name: str, opened: OpenedSource) -> None:
    """Compare a model that took printed classes with the original."""
    before, expected = original(name)
    model, file = copy.deepcopy(before), zoo_file(name)
    use_classes(model, (*opened.classes, *(s.cls for s in opened.stages)), namespace(opened))
    batch = float64_batch(file)
    assert_same(result(model, lambda: loss_of(file, model, batch)), expected)


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_every_module_can_be_opened_at_once(name: str) -> None:
    graph = zoo_graph(name)
    calls = [key for key, call in graph.calls.items() if not call.is_function]
    check_equal(name, opened_by_force(name, calls))


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_the_root_and_its_layers_can_be_opened(name: str) -> None:
    graph = zoo_graph(name)
    split = split_graph(graph, zoo_modules(name))
    layers = {layer.call for layer in split.layers.layers if layer.call in graph.calls}
    check_equal(name, opened_by_force(name, ["", *sorted(layers)]))


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_nothing_is_opened_where_nothing_is_split(name: str) -> None:
    opened = opened_by_force(name, [])
    assert (opened.classes, opened.stages, opened.loss) == ((), (), None)
