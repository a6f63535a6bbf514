"""The FLOPs of a step are those of all ops, although only one of equal layers is looked at."""

from __future__ import annotations

import pytest

from autopar.planner.annotate import annotate, total_work
from autopar.planner.plan.solving.costing import SearchSubject, model_flops
from autopar.planner.precision import Precision
from tests.planner.plan.plans import parts_of


@pytest.mark.parametrize("model", ["llama.py", "t5.py"])
def test_a_step_has_the_flops_of_all_its_ops(model: str) -> None:
    graph, axes, layers = parts_of(model, "size=tiny")
    done = total_work(graph.ops, annotate(graph, axes, batch=1, precision=Precision.BF16))
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    assert model_flops(subject, 6) == 6 * (done.forward_flops + done.backward_flops)
