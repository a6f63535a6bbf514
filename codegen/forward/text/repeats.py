"""Finds what a body has computed before, so that positions, masks and angles are made once."""

from __future__ import annotations

from collections.abc import Mapping, Set

from autopar.codegen.forward.text.expressions import Expression, Held
from autopar.planner.graph import Tensor


class Repeats:
    """The values without a gradient that a body has computed, by how it computes them.

    Hugging Face's masks count the positions once for the queries and once for the keys, and so
    for each kind of layer. What anything writes to is left as it is.
    """

    def __init__(self, tensors: Mapping[str, Tensor], written_later: Set[str]) -> None:
        self.tensors, self.written_later = tensors, written_later
        self.made: dict[Expression, Held] = {}

    def earlier(self, expression: Expression, made: Held) -> Held | None:
        """Return the value that is this one already, and remember this one if there is none."""
        if self.tensors[made.tensor].requires_grad or made.tensor in self.written_later:
            return None
        found = self.made.setdefault(expression, made)
        return found if found != made and found.layout == made.layout else None
