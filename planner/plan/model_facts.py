"""Gathers what a plan says of the model that it is for, from the model file and its graph."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.planner.graph import Graph
from autopar.planner.model_file import ModelFile
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
    digest = hashlib.sha256()
    for file in sorted(_sources(path)):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(path: Path) -> set[Path]:
    """Return a file and, through imports, what lies in its folder."""
    found, waiting = {path}, [path]
    while waiting:
        for name in _imported(waiting.pop()):
            module = path.parent.joinpath(*name.split("."))
            for file in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
                if file.is_file() and file not in found:
                    found.add(file)
                    waiting.append(file)
    return found


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
