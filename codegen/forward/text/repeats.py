"""Finds what a body has computed before, so that positions, masks and angles are made once."""

from __future__ import annotations

from autopar.codegen.forward.text.expressions import Expression, Held
from autopar.planner.graph import Graph


class Repeats:
    """The values without a gradient that a body has computed, by how it computes them.

    Hugging Face's masks count the positions once for the queries and once for the keys, and so
    for each kind of layer. What anything writes to is left as it is.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[Expression, Held] = {}

    def earlier(self, expression: Expression, made: Held) -> Held | None:
        """Return the value that is this one already, and remember this one if there is none."""
        learns = self.graph.tensors[made.tensor].requires_grad
        if learns or self.graph.index.is_written_later(made.tensor):
            return None
        found = self.made.setdefault(expression, made)
        return found if found != made and found.layout == made.layout else None
