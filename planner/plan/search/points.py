"""Lists what a search looks at: degrees with microbatches, and the variants of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.cluster.blocks import Share
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.bounds.bounding import Bounds
from autopar.planner.plan.declared.constraints import Constraints, Objective, allows
from autopar.planner.plan.declared.lone_rows import least_rows
from autopar.planner.plan.search.degrees import (
    BatchFacts,
    check_degrees,
    may_share_unevenly,
)
from autopar.planner.plan.search.placing import in_orders
from autopar.planner.plan.search.shares import uneven
from autopar.planner.plan.search.space import (
    Choices,
    microbatches_of,
    simplest,
    uneven_microbatches_of,
    variants,
)
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
        legal = check_degrees(self.cluster.size, self.constraints, self._batch)
        layers = len(self.subject.layers.layers)
        for pipeline, data, tensor in legal:
            if pipeline <= layers and tensor <= self._most_tensor():
                yield from self._of_degrees(pipeline, data, tensor)

    def _of_degrees(self, pipeline: int, data: int, tensor: int) -> Iterator[Arrangement]:
        microbatches = self._microbatches(data)
        for each, count in microbatches:
            point = simplest(
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                microbatch=max(each),
                microbatches=count,
                precision=self.constraints.precision,
            )
            rows = each if len(set(each)) > 1 else ()
            yield from in_orders(replace(point, rows=rows), self.orders, self.choices)
        if microbatches and self._may_suit_devices:
            yield from self._uneven(point)

    def _microbatches(self, data: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the rows of each data rank's microbatch, and how many there are, as is allowed.

        The smallest never holds more rows at once than another.
        """
        constraints, fixed = self.constraints, self._batch.fixed
        assert constraints.global_batch is not None
        least = self._least_rows[data > 1]
        even = microbatches_of(constraints.global_batch, data)
        every = [((size,) * data, count) for size, count in even]
        if may_share_unevenly(constraints, self._batch):
            every += uneven_microbatches_of(constraints.global_batch, data)
        allowed = [
            (each, count)
            for each, count in every
            if {fixed, constraints.microbatch} <= {None, max(each)}
            if min(each) >= least
            if count == 1 or not constraints.one_microbatch
        ]
        return allowed[:1] if self.bounds.objective is Objective.MEMORY else allowed

    @cached_property
    def _batch(self) -> BatchFacts:
        return BatchFacts.of(self.subject.graph)

    @cached_property
    def _least_rows(self) -> tuple[int, int]:
        """The fewest rows of a microbatch on one data rank, and on several."""
        graph = self.subject.graph
        return least_rows(graph, data=1), least_rows(graph, data=2)

    @property
    def _may_suit_devices(self) -> bool:
        """Whether unlike devices may have the rows that suit them."""
        return (
            self.constraints.microbatch is None
            and self.bounds.objective is not Objective.MEMORY
            and self._batch.may_be_uneven
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
