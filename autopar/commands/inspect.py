"""`autopar inspect`: what autopar understands of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autopar.commands.plan_options import ARG, DEVICE, MODEL
from autopar.console import print_json, progress, results
from autopar.graph_files import check_destination, write_graph
from autopar.number_options import whole
from autopar.pages.inspection_page import ops_table, page
from autopar.planner.annotated import annotated_graph, annotated_ops
from autopar.planner.cluster.choose import device_for
from autopar.planner.findings.optimizer_probe import optimizer_traits
from autopar.planner.inspection import inspect_graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.optimizer_limits import with_moments
from autopar.planner.precision import Precision
from autopar.planner.trace import trace


def inspect(
    model: MODEL,
    arg: ARG = None,
    batch: Annotated[
        int, whole("--batch", least=1, text="Rows of a microbatch, whose costs are shown.")
    ] = 1,
    ops: Annotated[
        bool, typer.Option("--ops", help="List the ops: FLOPs, bytes moved and kept, seconds.")
    ] = False,
    graph_file: Annotated[
        Path | None,
        typer.Option(
            "--graph", metavar="FILE", help="Write the annotated graph: .graphml or .dot."
        ),
    ] = None,
    device: DEVICE = None,
    precision: Annotated[
        Precision,
        typer.Option("--precision", metavar="TYPE", help="bf16 (as usual), fp16 or fp32."),
    ] = Precision.BF16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what autopar understands of a model: parameters, layers, axes, costs.

    With --ops, or --graph FILE, each op on a --device in a --precision, unsplit.

    Example: autopar inspect models_zoo/gpt2.py --arg size=124m --batch 8
    """
    if graph_file is not None:
        check_destination(graph_file)
    model_file = load_model_file(model, arg or ())
    with progress("tracing the model"):
        graph = trace(model_file)
    if ops or graph_file is not None:
        rows, on = graph.fixed_batch or batch, device_for(device)[0]
        annotated = annotated_ops(graph, batch=rows, precision=precision, device=on)
        if graph_file is not None:
            nodes = annotated_graph(graph, annotated, batch=rows, precision=precision)
            write_graph(nodes, graph_file)
            results().print(f"Written: {graph_file}", soft_wrap=True)
        elif as_json:
            print_json([asdict(one) for one in annotated])
        else:
            results().print(ops_table(annotated, on, precision, batch=rows))
        return
    with progress("inspecting the model"):
        optimizer = optimizer_traits(model_file, graph)
        inspection = inspect_graph(
            with_moments(graph, optimizer),
            model=model_file.name,
            batch=batch,
            optimizer=optimizer.name if optimizer else "AdamW",
        )
    if as_json:
        print_json(asdict(inspection))
        return
    for part in page(inspection):
        results().print(part)
