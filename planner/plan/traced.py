"""Turns a model file into plain data, which is all that a plan needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.planner.findings.traits import OptimizerTraits
from autopar.planner.graph.graph import Graph
from autopar.planner.plan.declared.limits import with_moments
from autopar.planner.plan.plan import Model, model_facts
from autopar.planner.precision import Precision

if TYPE_CHECKING:
    from autopar.planner.model.model_file import ModelFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A traced model.

    `notes` tell the user what a few rows of the dataset showed; None if no rows were read.
    """

    model: Model
    graph: Graph  # with the moments of its optimizer
    optimizer: OptimizerTraits | None  # None if it cannot be tried here
    notes: tuple[str, ...] | None = None
    is_recalled: bool = (
        False  # whether it is from the cache, and must be checked before a script is written
    )


def trace_model(
    model_file: ModelFile,
    *,
    spec: str,
    arguments: Sequence[str],
    precision: Precision,
    rows: int | None,
) -> TracedModel:
    """Trace a model file, and try its optimizer.

    `rows` are those of a microbatch, for a model that accepts only one number of rows.
    """
    from autopar.planner.findings.optimizer import optimizer_traits  # needs torch
    from autopar.planner.trace import trace_for_rows

    graph = trace_for_rows(model_file, rows, precision)
    optimizer = optimizer_traits(model_file, graph)
    graph = with_moments(graph, optimizer)
    model = model_facts(model_file, graph, spec=spec, arguments=arguments)
    return TracedModel(model=model, graph=graph, optimizer=optimizer)


def with_spec(traced: TracedModel, spec: str) -> TracedModel:
    """Return a traced model with another path to the same file."""
    return replace(traced, model=replace(traced.model, spec=spec))
