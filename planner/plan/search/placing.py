"""Turns a point of the space into one for each order of unlike nodes that makes a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.planner.cluster.blocks import kinds_of_blocks
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.steps.rank_groups import rank_groups
from autopar.planner.plan.search.space import Choices, sharding


def in_orders(
    point: Arrangement, orders: Sequence[Cluster], choices: Choices
) -> Iterator[Arrangement]:
    """Yield the point in every order of the nodes whose groups differ from those before.

    Layouts are solved for the tensor groups of the first order, so that orders in which these lie
    otherwise are left out.
    """
    seen: set[object] = set()
    shape = group_shape(orders[0], point.tensor, 1)
    for number, cluster in enumerate(orders):
        placed = replace(point, order=number)
        groups = _groups(placed, cluster, choices)
        if groups not in seen and group_shape(cluster, point.tensor, 1) == shape:
            seen.add(groups)
            yield placed


def _groups(point: Arrangement, cluster: Cluster, choices: Choices) -> object:
    """Return everything of an order that a prediction sees."""
    shards = sorted({shard for _, shard in sharding(point, choices)} | {point.data})
    return (
        kinds_of_blocks(cluster, point.pipeline),
        *(rank_groups(cluster, replace(point, shard=shard)) for shard in shards),
    )
