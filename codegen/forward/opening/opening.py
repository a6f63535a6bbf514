"""Holds which calls have code of their own, and in which of them each conversion stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.codegen.forward.reading.calls import CallTree
from autopar.codegen.forward.reading.split import Split
from autopar.planner.layouts import Layout
from autopar.planner.ops import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The opened calls, those whose code stands in their caller's, and the place of conversions.

    `places` tells for an op, one of its inputs and a layout in which call the input is converted to
    that; `leaves` tells for a tensor that it is converted before it leaves a call, and to what.
    """

    split: Split
    tree: CallTree
    opened: frozenset[str]
    inlined: frozenset[str]
    places: Mapping[tuple[str, str, Layout], str]
    leaves: Mapping[str, tuple[str, Layout]]

    @property
    def printed(self) -> frozenset[str]:
        """The calls whose code is printed."""
        return self.opened | self.inlined

    def scope(self, op: Op) -> str:
        """Return the call whose printed code contains an op, or the call that hides it."""
        for call in reversed(self.tree.chain(op)):
            if call not in self.inlined:
                return call
        raise AssertionError(op.name)

    def unit(self, op: Op, scope: str) -> str | None:
        """Return the call directly below printed code in which an op runs, None for its own ops."""
        chain = self.tree.chain(op)
        if scope not in chain:  # the loss, printed behind the model's own code
            return None
        below = chain[chain.index(scope) + 1 :]
        return next((call for call in below if call not in self.inlined), None)

    def is_hidden(self, op: Op) -> bool:
        """Whether an op runs in a module that is called as it is."""
        return self.scope(op) not in self.opened

    def cares_for(self, op: Op, call: str) -> bool:
        """Whether a call, or one inside it, is open and so sees to the randomness of an op."""
        chain = self.tree.chain(op)
        return any(inner in self.opened for inner in chain[chain.index(call) :])

    def entry(self, call: str, tensor: str) -> Layout:
        """Return the layout in which a tensor is handed to a call."""
        arrives = self.arrives(tensor, call)
        for op in self.tree.graph.index.readers[tensor]:
            if self.tree.is_inside(op, call):
                for layout in reversed(self.split.way(op, op.inputs.index(tensor))[1:]):
                    place = self.places.get((op.name, tensor, layout))
                    if place is not None and call not in self.tree.chains[place]:
                        return layout
        return arrives

    def arrives(self, tensor: str, call: str) -> Layout:
        """Return the layout of a tensor outside the calls that it leaves, as seen from a call."""
        left = self.leaves.get(tensor)
        if left is not None and left[0] not in self.tree.chains[call]:
            return left[1]
        return self.split.made(tensor)
