"""A model as source text to its graph: written as a user would write it, loaded and traced."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import torch

from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Buffer, Op
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from autopar.planner.trace.build import TRACED_BATCH, build
from autopar.planner.trace.convert import convert
from autopar.planner.trace.export import export

HEADER = """
import torch
import torch.nn.functional as F
from torch import nn

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 4)}

def loss(outputs, batch):
    return outputs.float().square().mean()

class Stack(nn.Sequential):
    def forward(self, x):
        return super().forward(x)
"""

LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        {body}

def build_model():
    return Model()
"""


def linear_model(*lines: str) -> str:
    """Return the source of a model that holds one layer, and does what the lines say."""
    return LINEAR.format(body="\n        ".join(lines))


def written(folder: Path, source: str) -> Path:
    """Write a model file: the header, then what is peculiar to the model."""
    path = folder / "subject.py"
    path.write_text(HEADER + dedent(source))
    return path


def traced(folder: Path, source: str, arguments: Sequence[str] = ()) -> Graph:
    """Trace the model file of a source."""
    return trace(load_model_file(str(written(folder, source)), arguments))


def traced_without_folding(folder: Path, source: str) -> Graph:
    """Trace every block of the model anew, as `trace` does where blocks differ."""
    model_file = load_model_file(str(written(folder, source)))
    subject = build(model_file, device="meta", dtype=torch.float64, batch_size=TRACED_BATCH)
    return convert(export(subject, fold=False))


def line_of(path: Path, text: str) -> int:
    """Return the number of the first line that contains a text."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def ops_of(graph: Graph, name: str) -> tuple[Op, ...]:
    """Return the ops of one kind, such as `linear`."""
    return tuple(op for op in graph.ops if op.target.split(".")[1] == name)


def buffer_of(graph: Graph, name: str) -> Buffer:
    """Return a buffer by name."""
    (found,) = (buffer for buffer in graph.buffers if buffer.name == name)
    return found
