"""`autopar inspect`: what autopar understands of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.console import progress, results
from autopar.planner.model_file import load_model_file
from autopar.planner.trace import trace


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="path.py or path.py:factory")],
    arg: Annotated[
        list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="For the model file.")
    ] = None,
) -> None:
    """Show what autopar understands of a model: parameters, layers, axes, costs."""
    with progress("tracing the model"):
        graph = trace(load_model_file(model, arg or ()))
    results().print(f"{len(graph.ops)} ops, {len(graph.parameters)} parameters")
