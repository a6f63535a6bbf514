"""Calls metrics() once while planning: a fault of it need not wait for a training."""

from __future__ import annotations

from typing import Any

import torch

from autopar.planner.errors import AutoparError, InputError
from autopar.planner.graph import Graph
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import outside_of
from autopar.planner.plan.plan import Model
from autopar.planner.trace.build import Subject, build
from autopar.runtime.evaluation.row_metrics import fault_of_metrics

_ROWS = 2
_MOST_PARAMETERS = 10**8  # of a model that is built in about a second
_MOST_FLOPS = 10**10  # of a forward that takes a CPU about a second


def check_metrics(file: ModelFile, graph: Graph, facts: Model) -> None:
    """Refuse a metrics() that fails for the example batch, or returns what has no mean over rows.

    That of a large model is tried by its script, before it trains.
    """
    rows = graph.fixed_batch or _ROWS
    flops = 2 * facts.parameters * facts.tokens_per_row * rows
    if file.metrics is None or facts.parameters > _MOST_PARAMETERS or flops > _MOST_FLOPS:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            subject = build(file, device="cpu", dtype=None, batch_size=rows)
            outputs = _outputs(subject)
    except AutoparError:
        raise
    except Exception:  # the model may want what is where the script runs
        return
    fault = fault_of_metrics(file.metrics(outputs, subject.batch))
    if fault is not None:
        found, fix = fault
        raise InputError(found, where=str(file.path), fix=fix)


@torch.no_grad()
def _outputs(subject: Subject) -> Any:
    """Return what the model returns in an evaluation, and put back what it changes elsewhere."""
    before = outside_of(subject.path, subject.model).snapshot()
    subject.model.eval()
    try:
        given = {key: value for key, value in subject.batch.items() if key in subject.step.keys}
        return subject.model(**given)
    finally:
        before.put_back()
