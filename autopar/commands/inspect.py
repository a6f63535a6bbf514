"""`autopar inspect`: what autopar understands of a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from autopar.commands.plan_options import ARG, MODEL
from autopar.console import progress, results
from autopar.inspection_page import page
from autopar.number_options import whole
from autopar.planner.findings.optimizer_probe import optimizer_traits
from autopar.planner.inspection import inspect_graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.optimizer_limits import with_moments
from autopar.planner.trace import trace


def inspect(
    model: MODEL,
    arg: ARG = None,
    batch: Annotated[
        int, whole("--batch", least=1, text="Rows of a microbatch, whose costs are shown.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what autopar understands of a model: parameters, layers, axes, costs.

    Example: autopar inspect models_zoo/gpt2.py --arg size=124m --batch 8
    """
    model_file = load_model_file(model, arg or ())
    with progress("tracing the model"):
        graph = trace(model_file)
        optimizer = optimizer_traits(model_file, graph)
        inspection = inspect_graph(
            with_moments(graph, optimizer),
            model=model_file.name,
            batch=batch,
            optimizer=optimizer.name if optimizer else "AdamW",
        )
    if as_json:
        print(json.dumps(asdict(inspection), indent=2))
        return
    for part in page(inspection):
        results().print(part)
