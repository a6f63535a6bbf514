"""Layers that write one buffer are in one stage."""

from __future__ import annotations

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.errors import InfeasibleError
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.search.demands import shared_buffers
from autopar.planner.plan.search.search import search
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.trace import trace
from tests.field.cells import MODELS
from tests.planner.plan.plans import model as model_facts
from tests.planner.plan.searches import declared
from tests.planner.subjects import ZOO_MODELS, zoo_graph


def _subject(name: str) -> SearchSubject:
    graph = zoo_graph(name) if name in ZOO_MODELS else trace(load_model_file(str(MODELS / name)))
    axes = infer_axes(graph)
    return SearchSubject(graph=graph, axes=axes, layers=find_layers(graph, axes))


def test_the_statistics_of_a_norm_that_runs_again_are_shared() -> None:
    found = shared_buffers(_subject("siamese.py"))
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert set(found) == {f"encoder.1.{name}" for name in names}


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_models_whose_layers_run_once_share_no_buffers(name: str) -> None:
    assert shared_buffers(_subject(name)) == {}


def test_a_pipeline_that_would_have_several_of_one_buffer_is_refused_with_its_name() -> None:
    subject = _subject("siamese.py")
    with pytest.raises(InfeasibleError, match="pp=2") as told:
        search(
            subject.graph,
            subject.axes,
            subject.layers,
            model_facts(subject.graph, "siamese.py"),
            choose_cluster(2, "cpu"),
            declared(global_batch=8, pins__pp=2),
        )
    assert "the buffer encoder.1." in told.value.expected
