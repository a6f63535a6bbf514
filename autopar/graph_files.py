"""Writes a graph as a file that other programs draw: GraphML, or the language of Graphviz."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import networkx as nx

from autopar.planner.destination import check_writable, refuse_others, write_whole
from autopar.planner.errors import InputError

_BEGINNINGS = {
    ".graphml": "<!-- The ops of a model, written by autopar. -->",
    ".dot": "// The ops of a model, written by autopar.",
}


def check_destination(path: Path) -> None:
    """Refuse a file of another kind, and one that autopar did not write."""
    beginning = _BEGINNINGS.get(path.suffix)
    if beginning is None:
        raise InputError(
            f"{path} is no name of a graph", expected="a file .graphml, or .dot for Graphviz"
        )
    check_writable(path)
    refuse_others(path, beginning=beginning)


def write_graph(graph: nx.DiGraph, path: Path) -> None:
    """Write a graph in the form that the name of the file says."""
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
