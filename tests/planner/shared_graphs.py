"""Graphs that the workers of one run of tests leave for each other, in a folder of this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.codegen.subject import lengths_found
from autopar.planner.graph.graph import Graph
from autopar.planner.plan.files.cache import NO_CACHE, Cache, CachedLengths
from autopar.planner.plan.files.graph import graph_document


@dataclass(slots=True)
class SharedGraphs:
    """Where they lie; nowhere if there is only one worker."""

    store: Cache = NO_CACHE

    def graph(self, key: object, trace: Callable[[], Graph]) -> Graph:
        """Return the graph of a key, which must name all that it depends on; trace it once."""
        (graph,) = lengths_found(self.store, key) or (None,)
        if graph is None:
            graph = trace()
            self.store.keep(CachedLengths(graph=graph_document(graph)), key)
        return graph


SHARED = SharedGraphs()
