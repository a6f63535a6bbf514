"""Turns a cluster into one of its first devices: whole nodes, or a part of the first one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from autopar.planner.cluster.cluster import Cluster, Level, Unit
from autopar.planner.cluster.levels import cluster_from
from autopar.planner.errors import InputError

_MOST_TOLD = 8


def prefix_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of devices that the first nodes have, and those within the first node."""
    whole = tuple(accumulate(node.devices for node in cluster.nodes))
    return (*range(1, whole[0]), *whole)


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster of the first devices, joined as they are in the whole."""
    if count == cluster.size:
        return cluster
    sizes = prefix_sizes(cluster)
    if count not in sizes:
        raise InputError(
            f"{count} of the {cluster.size} devices are not a number of whole nodes",
            expected=f"{_told(sizes)}",
            fix="nodes are taken in their order; of the first one, a part may be",
        )
    first = cluster.nodes[0]
    if count <= first.devices:
        part = replace(first, devices=count)
        return cluster_from([part], network=None, origin=cluster.origin)
    nodes = cluster.nodes[: sizes.index(count) - first.devices + 2]
    return Cluster(nodes=nodes, levels=_levels(cluster, count), origin=cluster.origin)


def _levels(cluster: Cluster, count: int) -> tuple[Level, ...]:
    """Return the levels of the first devices, up to the first whose link joins all of them."""
    levels: list[Level] = []
    for level in cluster.levels:
        levels.append(Level(name=level.name, units=tuple(_units(level, count))))
        if len(levels[-1].units) == 1:
            break
    return tuple(levels)


def _units(level: Level, count: int) -> Iterator[Unit]:
    start = 0
    for unit in level.units:
        if start < count:
            yield replace(unit, ranks=min(unit.ranks, count - start))
        start += unit.ranks


def _told(sizes: tuple[int, ...]) -> str:
    more = f", … {sizes[-1]}" if len(sizes) > _MOST_TOLD else ""
    return ", ".join(map(str, sizes[:_MOST_TOLD])) + more
