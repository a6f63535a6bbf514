"""Lists the orders of unlike nodes that a plan may have, the same however a file lists them.

Few nodes are put in every order. Many stay side by side with their like, since a group of unlike
devices waits for the slowest of them: then the kinds are put in every order, if they are few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import factorial, prod

from autopar.planner.cluster.cluster import Cluster, Node
from autopar.planner.cluster.device import Device
from autopar.planner.cluster.levels import Racks, cluster_from

MOST_ORDERS = 24


def node_orders(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the cluster in each order of its nodes, the one of the fastest nodes first first."""
    if cluster.has_equal_nodes:
        return (cluster,)
    counts = Counter(cluster.nodes)
    kinds = sorted(counts, key=_place)
    return tuple(_ordered(cluster, nodes) for nodes in _orders(kinds, counts))


def _place(node: Node) -> tuple[object, ...]:
    """What orders unlike nodes: fast ones come first, then those with much memory, then large."""
    device = node.device
    return -half_peak(device), -device.memory_bytes, -node.devices, device.name, repr(node)


def half_peak(device: Device) -> float:
    """Return the 16-bit peak of a device, that of fp32 where it has no 16-bit units."""
    peaks = dict(device.peaks)
    return next(peaks[dtype] for dtype in ("bf16", "fp16", "fp32") if dtype in peaks)


def _orders(kinds: Sequence[Node], counts: Counter[Node]) -> Iterator[tuple[Node, ...]]:
    """Yield orders of nodes, the like side by side first."""
    if _number(counts) <= MOST_ORDERS:
        yield from _every_order(counts, kinds)
        return
    alike = permutations(kinds) if factorial(len(kinds)) <= MOST_ORDERS else (kinds, kinds[::-1])
    for order in alike:
        yield tuple(node for kind in order for node in [kind] * counts[kind])


def _number(counts: Counter[Node]) -> int:
    """Return in how many orders so many nodes of each kind can be put, or some number beyond."""
    total = sum(counts.values())
    if total > MOST_ORDERS:
        return total
    return factorial(total) // prod(factorial(one) for one in counts.values())


def _every_order(counts: Counter[Node], kinds: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    if not counts.total():
        yield ()
    for kind in kinds:
        if counts[kind]:
            for rest in _every_order(counts - Counter([kind]), kinds):
                yield (kind, *rest)


def _ordered(cluster: Cluster, nodes: Sequence[Node]) -> Cluster:
    """Return the cluster with its nodes in another order, on the same network."""
    outer = {level.name: level for level in cluster.levels if level.name in ("network", "rack")}
    network = outer["network"].units[0].link
    racks = None
    if "rack" in outer:
        racks = Racks(nodes=_nodes_per_rack(cluster), link=outer["rack"].units[0].link)
    return cluster_from(nodes, network=network, racks=racks, origin=cluster.origin)


def _nodes_per_rack(cluster: Cluster) -> int:
    """Return how many nodes, or domains of them, the first rack joins: all but the last do."""
    domains = next(level.units for level in cluster.levels if level.name == "node")
    first = next(level.units[0].ranks for level in cluster.levels if level.name == "network")
    joined = 0
    while first > 0:
        first -= domains[joined].ranks
        joined += 1
    return joined
