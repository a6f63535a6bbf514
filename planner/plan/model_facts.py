"""Gathers what a plan says of the model that it is for, from the model file and its graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from autopar.planner.graph import Graph
from autopar.planner.model.import_name import import_name
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.sources import sources
from autopar.planner.plan.plan import Model


def model_facts(
    model_file: ModelFile, graph: Graph, *, spec: str, arguments: Sequence[str]
) -> Model:
    """Return the facts; `spec` and `arguments` ("key=value") are as the person gave them."""
    pairs = (argument.partition("=") for argument in arguments)
    return Model(
        name=model_file.name,
        spec=spec,
        arguments=tuple((key, value) for key, _, value in pairs),
        source_hash=source_hash(model_file.path),
        parameters=sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters),
        has_loss=model_file.loss is not None,
        has_dataset=model_file.build_dataset is not None,
        has_optimizer=model_file.build_optimizer is not None,
        has_scheduler=model_file.build_scheduler is not None,
        tokens_per_row=_tokens_per_row(graph),
    )


def _tokens_per_row(graph: Graph) -> int:
    """Return the positions of a row of text; 1 where no input is a sequence of numbers."""
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if tensor.dtype.startswith("int") and len(tensor.shape) == 2:
            return tensor.shape[1].at(1)
    return 1


def source_hash(path: Path) -> str:
    """Return 64 hexadecimal digits of a model file and of the files beside it that it imports."""
    digest, folder = hashlib.sha256(), import_name(path).folder
    for file in sources(path):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
