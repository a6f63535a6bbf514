"""Finds the lines at which torch.compile would stop in the code of a model's layers.

One layer of each kind is given to dynamo, on the meta device, with the arguments of its first call.
Nothing is compiled: the code is traced, and the traced graph is thrown away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import AutoparError, text_of
from autopar.planner.graph.graph import Graph, GraphBreak
from autopar.planner.layers import compiled_ops, find_layers
from autopar.planner.model.guard import contained
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import state_scope
from autopar.planner.trace.build import TRACED_BATCH, build
from autopar.planner.trace.export import quiet
from autopar.planner.trace.model_checks import is_library_file

_MOST_CHARACTERS = 120  # of a reason


def graph_breaks(model_file: ModelFile, graph: Graph) -> tuple[GraphBreak, ...]:
    """Return where torch.compile cannot trace layers; () for models that do not run on meta."""
    kinds = _layers_by_kind(graph)
    if not kinds:
        return ()
    rows = graph.fixed_batch or TRACED_BATCH
    found: dict[str, GraphBreak] = {}
    with suppress(AutoparError):
        subject = build(model_file, device="meta", dtype=None, batch_size=rows)
        model, outside = subject.model, state_scope(subject.path, subject.model)
        tried = {paths[0]: paths for paths in kinds}
        with (
            quiet(),
            contained(subject.path),
            outside.kept(),
            suppress(Exception),
            _each_tried(model, tried, found),
        ):
            subject.step.run(subject.batch)
    return tuple(found.values())


def _layers_by_kind(graph: Graph) -> Sequence[Sequence[str]]:
    """Return the paths of layers that torch.compile could compile, grouped by equal ops."""
    layers = find_layers(graph, infer_axes(graph)).layers
    found: defaultdict[tuple[int, str], dict[str, None]] = defaultdict(dict)
    for layer in layers:
        if compiled_ops(layer, graph):
            call = graph.calls[layer.call]
            found[layer.layer_class, call.class_name][call.path] = None
    return [tuple(paths) for paths in found.values()]


class _AllTriedError(Exception):
    """Ends the forward of the model once a layer of each kind was tried."""


class _TracedError(Exception):
    """Ends a call of torch.compile after the code was traced."""


@contextmanager
def _each_tried(
    model: nn.Module, tried: Mapping[str, Sequence[str]], found: dict[str, GraphBreak]
) -> Iterator[None]:
    """Try to trace each module of `tried` when it is called; add its graph break to `found`.

    `tried` maps the path of a module to the paths of all modules like it.
    """
    waiting = set(tried)

    def run(path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if path in waiting:
            waiting.remove(path)
            stop = _stop(forward, args, kwargs)
            if stop is not None:
                where, why = stop
                found[path] = GraphBreak(paths=tuple(tried[path]), where=where, why=why)
            if not waiting:
                raise _AllTriedError
        return forward(*args, **kwargs)

    with ExitStack() as stack:
        for path in tried:
            module = model.get_submodule(path)
            stack.enter_context(patch.object(module, "forward", partial(run, path, module.forward)))
        stack.callback(torch._dynamo.reset)
        yield


def _stop(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return the line at which dynamo stops and its reason, or None if it traces the whole code."""
    compile_: Any = torch.compile
    compiled = compile_(forward, backend=_end, fullgraph=True, dynamic=False)
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        if isinstance(getattr(error, "inner_exception", None), _TracedError):
            return None
        frames = getattr(error, "real_stack", None) or ()
        own = [one for one in frames if not is_library_file(one.filename)] or list(frames)
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
        return where, _reason(text_of(error))
    return None


def _end(_: object, __: object) -> Any:
    """Serve as dynamo's backend, which is called when the code has been traced."""
    raise _TracedError


def _reason(text: str) -> str:
    """Return the explanation in a message of dynamo, or its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("Explanation: ")), lines[0])
    told = told.removeprefix("Explanation: ")
    return told if len(told) <= _MOST_CHARACTERS else f"{told[: _MOST_CHARACTERS - 1]}…"
