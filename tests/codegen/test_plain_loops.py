"""Scripts of twelve kinds of models train as plain loops do, or tell what they train instead."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.search import search
from autopar.planner.plan.telling.words import meaning_notes
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.plain_cells import CELLS, EQUAL, EXPECTED, KINDS, WAYS
from tests.codegen.plain_loop import train_by_script, train_plainly
from tests.field.trial import cluster_of, constraints_of

FP32, FLOAT64 = 1e-5, 1e-10


@cache
def _traced(kind: str) -> tuple[ModelFile, Graph, GraphAxes, Layers]:
    file = load_model_file(str(KINDS[kind].path), KINDS[kind].arguments)
    graph = trace(file)
    axes = infer_axes(graph)
    return file, graph, axes, find_layers(graph, axes)


def planned(kind: str, way: str) -> Plan:
    """Return the plan of a model that is laid out in one way."""
    file, graph, axes, layers = _traced(kind)
    subject, demanded = KINDS[kind], WAYS[way]
    facts = model_facts(file, graph, spec=str(file.path), arguments=subject.arguments)
    constraints = constraints_of(subject, demanded)
    return search(graph, axes, layers, facts, cluster_of(demanded), constraints)


STAND = {
    ("DLRM", "tp"),
    ("DiT", "pp"),
    ("two towers", "dp whole"),
    ("masked experts", "dp"),
    ("nanoGPT", "dp tp"),
}


def test_each_of_twelve_kinds_is_tried_in_four_ways() -> None:
    ways = {kind: {way.removesuffix(" whole") for way in EXPECTED[kind]} for kind in KINDS}
    assert ways == {kind: {"dp", "tp", "pp", "dp tp"} for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), cells(CELLS, STAND))
def test_a_script_trains_as_a_plain_loop_or_tells_what_else(kind: str, way: str) -> None:
    expected, plan = EXPECTED[kind][way], planned(kind, way)
    found = train_by_script(plan)

    notes = meaning_notes(plan)
    assert len(notes) == bool(expected.note)
    for note in notes:
        assert expected.note in note
        assert note in " ".join(found.text.split())

    plain = train_plainly(KINDS[kind], torch.float32, rows=expected.rows)
    assert found.printed == pytest.approx(plain.losses, abs=FP32, rel=0.0)
    exact = train_plainly(KINDS[kind], torch.float64, rows=expected.rows)
    assert found.exact.losses == pytest.approx(exact.losses, abs=FLOAT64, rel=0.0)
    assert found.exact.norms == pytest.approx(exact.norms, abs=FLOAT64, rel=0.0)
    assert found.exact.parameters.keys() == exact.trained.keys()
    for name, value in exact.trained.items():
        own = found.exact.parameters[name]
        torch.testing.assert_close(own, value.double(), atol=FLOAT64, rtol=0.0, msg=name)

    if expected != EQUAL:  # the note is needed
        one_device = train_plainly(KINDS[kind], torch.float32, rows=EQUAL.rows)
        assert found.printed != pytest.approx(one_device.losses, abs=FP32, rel=0.0)
