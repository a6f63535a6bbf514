"""Turns the model columns of a row into a model file of the zoo, traced once per shape.

Only a few layers are traced: the others are equal to them, so the costs of one serve all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from benchmarks.validation.table import Row, stated

TRACED_LAYERS = 2  # two are needed to see that they are equal
USUAL_VOCABULARY = 50257  # GPT-2's, if a table states none
PADDING = 128  # rows of a vocabulary table are padded to a multiple, so that matrix units fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model of the zoo and its arguments, but for the number of layers."""

    file: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq_len: int
    vocabulary: int
    is_tied: bool
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The trace of a model with a few layers, and the class of the repeated ones."""

    shape: ModelShape
    graph: Graph
    axes: GraphAxes
    layers: Layers
    block: int  # the class of the layers that repeat


def shape_of(row: Row, *, dropout: float) -> ModelShape:
    """Return the shape of a row's model."""
    hidden, heads = stated(row.hidden), stated(row.heads)
    is_gpt = "gpt" in row.model_family.casefold()
    vocabulary = _vocabulary(row)
    if row.ffn_hidden is None and not is_gpt:
        raise InputError("not stated: ffn_hidden")
    return ModelShape(
        file="gpt2.py" if is_gpt else "llama.py",
        hidden=hidden,
        heads=heads,
        kv_heads=row.kv_heads or heads,
        ffn=row.ffn_hidden or 4 * hidden,
        seq_len=stated(row.seq_len),
        vocabulary=vocabulary,
        is_tied=is_gpt and "nemotron" not in row.model_family.casefold(),
        dropout=dropout if is_gpt else 0.0,
    )


def _vocabulary(row: Row) -> int:
    """Return the number of rows of the embedding.

    A stated vocabulary is padded, so that matrix units fit and all tensor ranks have equally many
    rows. The usual vocabulary is padded only if there are several tensor ranks.
    """
    tensor = row.tp or 1
    if row.vocab is None and tensor == 1:
        return USUAL_VOCABULARY
    multiple = PADDING * tensor
    return ceil((row.vocab or USUAL_VOCABULARY) / multiple) * multiple


@cache
def traced(zoo: Path, shape: ModelShape) -> Traced:
    """Return the trace of a shape, which is cached."""
    arguments = [
        f"layers={TRACED_LAYERS}",
        f"heads={shape.heads}",
        f"kv_heads={shape.kv_heads}",
        f"dim={shape.hidden}",
        f"ffn={shape.ffn}",
        f"seq_len={shape.seq_len}",
        f"vocab_size={shape.vocabulary}",
        f"tied={shape.is_tied}",
    ]
    if shape.file == "gpt2.py":
        arguments.append(f"dropout={shape.dropout}")
    graph = trace(load_model_file(str(zoo / shape.file), arguments))
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    block = max(layers.runs, key=lambda run: run.count).layer_class
    return Traced(shape=shape, graph=graph, axes=axes, layers=layers, block=block)
