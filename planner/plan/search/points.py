"""Lists what a search looks at: degrees with microbatches, and the variants of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.cluster.blocks import Share
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.findings.uneven_rows import may_be_uneven
from autopar.planner.plan.bounds.bounding import Bounds
from autopar.planner.plan.declared.constraints import Constraints, Objective, allows
from autopar.planner.plan.declared.lone_rows import least_rows
from autopar.planner.plan.search.degrees import check_degrees
from autopar.planner.plan.search.placing import in_orders
from autopar.planner.plan.search.shares import uneven
from autopar.planner.plan.search.space import Choices, microbatches_of, simplest, variants
from autopar.planner.plan.solving.costing import Subject


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties need a place
class Points:
    """The degrees and microbatches that the constraints allow, under one objective."""

    subject: Subject
    cluster: Cluster
    constraints: Constraints  # with a global batch
    choices: Choices
    orders: Sequence[Cluster]  # of unlike nodes, the planned one first
    bounds: Bounds
    bucket_bytes: int

    def __iter__(self) -> Iterator[Arrangement]:
        constraints, graph = self.constraints, self.subject.graph
        legal = check_degrees(
            self.cluster.size,
            constraints,
            fixed_batch=graph.fixed_batch,
            fixed_at=graph.fixed_at,
        )
        layers = len(self.subject.layers.layers)
        for pipeline, data, tensor in legal:
            if pipeline <= layers and tensor <= self._most_tensor():
                yield from self._of_degrees(pipeline, data, tensor)

    def _of_degrees(self, pipeline: int, data: int, tensor: int) -> Iterator[Arrangement]:
        sizes = self._microbatches(data)
        for size, count in sizes:
            point = simplest(
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                microbatch=size,
                microbatches=count,
                precision=self.constraints.precision,
            )
            yield from in_orders(point, self.orders, self.choices)
        if sizes and self._may_be_uneven:
            yield from self._uneven(point)

    def _microbatches(self, data: int) -> list[tuple[int, int]]:
        """Return the rows of a microbatch, and how many there are, that so many data ranks allow.

        The smallest never holds more rows at once than another.
        """
        constraints, fixed = self.constraints, self.subject.graph.fixed_batch
        assert constraints.global_batch is not None
        least = self._least_rows[data > 1]
        sizes = [
            (size, count)
            for size, count in microbatches_of(constraints.global_batch, data)
            if size == (fixed or size) and size == (constraints.microbatch or size)
            if size >= least
            if count == 1 or not constraints.one_microbatch
        ]
        return sizes[:1] if self.bounds.objective is Objective.MEMORY else sizes

    @cached_property
    def _least_rows(self) -> tuple[int, int]:
        """The fewest rows of a microbatch on one data rank, and on several."""
        graph = self.subject.graph
        return least_rows(graph, data=1), least_rows(graph, data=2)

    @cached_property
    def _may_be_uneven(self) -> bool:
        return (
            self.constraints.microbatch is None
            and self.bounds.objective is not Objective.MEMORY
            and may_be_uneven(self.subject.graph)
        )

    def _uneven(self, point: Arrangement) -> Iterator[Arrangement]:
        """Yield a point with rows that suit unlike devices."""
        assert self.constraints.global_batch is not None
        return uneven(
            point,
            self.orders[0],
            global_batch=self.constraints.global_batch,
            least=self._least_rows[True],
            seconds=lambda one, rows: self.bounds.least_on(1, Share(one, rows)).total_seconds,
        )

    def _most_tensor(self) -> int:
        """Return the greatest tensor degree: the devices of a node, unless more is asked for.

        Beyond the links of a node the tensor axis would wait for the network in every layer, unless
        it may split the batch.
        """
        wanted = self.constraints.tensor or self.constraints.max_tensor
        if wanted is None and self.constraints.shares_rows:
            return self.cluster.size
        return wanted or max(node.devices for node in self.cluster.nodes)

    def variants(self, point: Arrangement) -> Iterator[Arrangement]:
        """Yield the variants of a point that the constraints allow."""
        for variant in variants(point, self.choices):
            one = replace(variant, bucket_bytes=self.bucket_bytes)
            if allows(self.constraints, one):
                yield one

    def enumerated(self) -> int:
        """Return how many arrangements there are."""
        return sum(len(tuple(self.variants(point))) for point in self)
