"""Finds the fp32 buffers that a model can train with in 16 bits only if they have 16 bits, too.

A buffer keeps its type beside parameters in 16 bits. Where the model adds it to activations as it
is (x + self.positions), these become fp32, and torch multiplies no fp32 by weights in 16 bits.
model.to(torch.bfloat16) has such buffers in 16 bits; so have plans, and tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE
from autopar.planner.rules.table import rule_of
from autopar.planner.trace.surroundings.unlike_types import UnlikeTypesError

Names = frozenset[str]

_MOST_KINDS = 4  # of buffers that are tried one by one


def traced_with_few(
    traced: Callable[[Names], Graph], wide: Callable[[], Mapping[str, Tensor]]
) -> Graph:
    """Return a trace in 16 bits with few narrowed buffers, and none that the forward writes.

    `traced` raises UnlikeTypesError where types clash; `wide` returns the buffers that may be
    narrowed. One that is written is narrowed after all where types clash without that.
    """
    try:
        return traced(frozenset())
    except UnlikeTypesError as error:
        clash = error
    kinds = _kinds(name for name, buffer in wide().items() if buffer.dim())
    chosen, found = _first_that_fits(traced, kinds, clash)
    likely = promoting(found)
    written = frozenset(one.name for one in found.buffers if one.updated)
    unlikely = [kind for kind in kinds if kind.isdisjoint(likely)]
    doubtful = [kind for kind in kinds if kind not in unlikely and not kind.isdisjoint(written)]
    for left_out in (frozenset[str]().union(*unlikely), *doubtful):
        fewer = chosen - left_out
        if fewer and fewer != chosen:
            with suppress(UnlikeTypesError):
                found = traced(fewer)
                chosen = fewer
    return found


def promoting(graph: Graph) -> Names:
    """Return the narrowed buffers that would let fp32 meet 16 bits, were they in fp32.

    That is in an op which wants operands of one type. A cast to the type that a buffer has by now
    leaves no op, so this may be more buffers than need be.
    """
    of = {b.name: frozenset({b.name}) for b in graph.buffers if b.narrowed}
    found: Names = frozenset()
    for op in graph.ops:
        given = [name for name in op.inputs if graph.tensors[name].dtype == MODEL_DTYPE]
        promoted = [of.get(name, frozenset()) for name in given]
        together = frozenset[str]().union(*promoted)
        if rule_of(op.target).alike and not all(promoted):
            found |= together
        for name in op.outputs:
            if together and graph.tensors[name].dtype == MODEL_DTYPE:
                of[name] = together
    return found


def _first_that_fits(
    traced: Callable[[Names], Graph], kinds: list[Names], clash: UnlikeTypesError
) -> tuple[Names, Graph]:
    """Return the first set of narrowed buffers that makes types fit, or raise the clash."""
    for number, chosen in enumerate(_choices(kinds)):
        try:
            return chosen, traced(chosen)
        except UnlikeTypesError as error:
            if number == 0 and (error.found, error.where) == (clash.found, clash.where):
                break  # no buffer has a part in it
    raise clash


def _choices(kinds: list[Names]) -> Iterator[Names]:
    every = frozenset[str]().union(*kinds)
    if every:
        yield every
    if 1 < len(kinds) <= _MOST_KINDS:
        yield from (every - kind for kind in kinds)
        if len(kinds) > 2:
            yield from kinds


def _kinds(names: Iterable[str]) -> list[Names]:
    """Gather the names that differ in the number of a layer alone."""
    kinds: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        parts = tuple("*" if part.isdecimal() else part for part in name.split("."))
        kinds.setdefault(parts, set()).add(name)
    return [frozenset(kind) for kind in kinds.values()]
