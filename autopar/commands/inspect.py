"""`autopar inspect`: shows what autopar understands of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
import typer

from autopar.console import print_json, progress, results
from autopar.options import ARG, DEVICE, MODEL, whole
from autopar.pages.other_pages import ops_table, page
from autopar.planner.annotate import annotated_graph, annotated_ops
from autopar.planner.cluster.file import device_for
from autopar.planner.errors import InputError
from autopar.planner.files import check_writable, refuse_others, write_whole
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.inspection import inspect_graph
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.limits import with_moments
from autopar.planner.precision import Precision, precision_words
from autopar.planner.trace import trace

_BEGINNINGS = {
    ".graphml": "<!-- The ops of a model, written by autopar. -->",
    ".dot": "// The ops of a model, written by autopar.",
}


def check_destination(path: Path) -> None:
    """Reject a path that is no graph file, or a file that autopar did not write."""
    beginning = _BEGINNINGS.get(path.suffix)
    if beginning is None:
        raise InputError(
            f"{path} is no name of a graph file", expected="a file .graphml, or .dot for Graphviz"
        )
    check_writable(path)
    refuse_others(path, beginning=beginning)


def write_graph(graph: nx.DiGraph, path: Path) -> None:
    """Write a graph in the format of the path's ending."""
    lines = nx.generate_graphml(graph) if path.suffix == ".graphml" else _dot(graph)
    write_whole(path, "\n".join([_BEGINNINGS[path.suffix], *lines, ""]), what="the graph")


def _dot(graph: nx.DiGraph) -> Iterator[str]:
    yield "digraph {"
    for name, attributes in graph.nodes(data=True):
        yield f"  {json.dumps(name)} [{_listed(attributes)}];"
    for maker, reader, attributes in graph.edges(data=True):
        yield f"  {json.dumps(maker)} -> {json.dumps(reader)} [{_listed(attributes)}];"
    yield "}"


def _listed(attributes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(str(value))}" for key, value in attributes.items())


def inspect(
    model: MODEL,
    arg: ARG = None,
    batch: Annotated[
        int, whole("--batch", least=1, text="Rows of a microbatch, whose costs are shown.")
    ] = 1,
    ops: Annotated[
        bool, typer.Option("--ops", help="List the ops: FLOPs, bytes moved and saved, seconds.")
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
        typer.Option("--precision", metavar="TYPE", help=f"{precision_words()}."),
    ] = Precision.BF16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what autopar understands of a model: parameters, layers, axes, costs.

    With --ops or --graph FILE, show each op, not split, on a --device in a --precision.

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
