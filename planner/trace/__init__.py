"""Turns a model file into a Graph: torch.export under the meta device, then plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.planner.errors import AutoparError, InputError, TraceError
from autopar.planner.graph import Graph
from autopar.planner.model_file import ModelFile, ModelMovedError
from autopar.planner.trace.build import TRACED_BATCH, Subject, build
from autopar.planner.trace.convert import convert
from autopar.planner.trace.export import export
from autopar.planner.trace.products import check_products
from autopar.planner.trace.values import CannotReplayError

__all__ = ["trace", "trace_for_rows"]

# A model that cannot be built or traced without memory is built for real, up to this size.
_LARGEST_REAL_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to hold the model while it is traced."""

    device: str
    dtype: torch.dtype | None


# In float64, what the model itself pins to float32 stays visible: in float32 `x.float()` leaves no
# mark that tells it from the model's own type. A model that mixes types in a way that float64
# breaks, or that reads values while it is built, is traced as it comes.
_WAYS = (
    _Way(device="meta", dtype=torch.float64),
    _Way(device="meta", dtype=None),
    _Way(device="cpu", dtype=None),
)


def trace(model_file: ModelFile, *, batch_size: int = TRACED_BATCH) -> Graph:
    """Trace one training step, from the batch to the loss, for every batch size at once."""
    failures: list[AutoparError] = []
    size_bytes = 0
    for way in _WAYS:
        if way.device == "cpu" and size_bytes > _LARGEST_REAL_BYTES:
            break
        try:
            subject = build(model_file, device=way.device, dtype=way.dtype, batch_size=batch_size)
            size_bytes = sum(p.numel() * p.element_size() for p in subject.model.parameters())
            return _graph(subject)
        except ModelMovedError:
            raise
        except (InputError, TraceError) as error:
            failures.append(error)
    raise failures[-1]


def trace_for_rows(model_file: ModelFile, rows: int | None) -> Graph:
    """Trace a model for every batch size, or for so many rows where it takes one number alone."""
    graph = trace(model_file)
    if rows is None or graph.fixed_batch in (None, rows):
        return graph
    try:
        return trace(model_file, batch_size=rows)
    except (InputError, TraceError):  # the number itself stands in the model's code
        return graph


def _graph(subject: Subject) -> Graph:
    try:
        graph = convert(export(subject, fold=True))
    except CannotReplayError:
        graph = convert(export(subject, fold=False))
    check_products(graph)
    if not graph.tensors[graph.loss].requires_grad:
        raise InputError(
            "the loss has no gradient",
            where=str(subject.path),
            expected="a loss that depends on trainable parameters",
            fix="look for .detach(), .item(), argmax or no_grad on the way to the loss",
        )
    return graph
