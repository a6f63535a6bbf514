"""Graphs that the workers of one run of tests leave for each other, in a folder of this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from autopar.planner.graph.graph import Graph
from autopar.planner.plan.files.cache import NO_CACHE, Cache, CachedLengths, lengths_found
from autopar.planner.plan.files.graph import graph_document

Found = TypeVar("Found", bound=Graph | None)


@dataclass(slots=True)
class SharedGraphs:
    """Where they lie; nowhere if there is only one worker."""

    store: Cache = NO_CACHE

    def graph(self, key: object, trace: Callable[[], Found]) -> Found:
        """Return the graph of a key, which must name all that it depends on; trace it once."""
        known = lengths_found(self.store, key)
        if known is not None:
            return cast(Found, known[0])
        graph = trace()
        kept = CachedLengths(graph=None if graph is None else graph_document(graph))
        self.store.keep(kept, key)
        return graph


SHARED = SharedGraphs()
