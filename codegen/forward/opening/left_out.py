"""Finds the calls that are given what opened code leaves out, for the loss does not need it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.opening.opening import Opening
from autopar.planner.ops import refs


def given_nothing(opening: Opening) -> Iterator[str]:
    """Yield the calls whose own code would find None where the model's has a tensor.

    It may ask that for its sizes, which the graph does not show.
    """
    calls, tensors = opening.tree.graph.calls, opening.tree.graph.tensors
    left_out = {
        name
        for call in opening.printed
        if call in calls
        for name in refs(calls[call].result)
        if name not in tensors
    }
    for key, call in calls.items():
        keywords = tuple(value for _, value in call.keywords)
        given = set(refs((call.arguments, keywords)))
        is_closed = key not in opening.printed and not call.is_function
        if is_closed and not left_out.isdisjoint(given):
            yield key
