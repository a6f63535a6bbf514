"""Finds the links that the traffic of a group of ranks crosses, and the devices of ranks.

Also lists the orders of unlike nodes to try; they do not depend on the order in the file. A few
nodes are put in every order. With many, equal nodes stay side by side, because a group of unlike
devices waits for the slowest one; then the kinds are put in every order if they are few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, permutations
from math import factorial, prod

from autopar.planner.cluster.cluster import (
    Backend,
    Cluster,
    Device,
    Link,
    LinkLevel,
    Machine,
    MeasuredCollective,
    Racks,
    Topology,
    cluster_from,
)
from autopar.planner.errors import InputError

Devices = tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class RowShare:
    """A device, and its rows of a microbatch."""

    device: Device
    rows: int


Kind = tuple[RowShare, ...]  # the different shares in a block of ranks that wait for each other


@lru_cache(maxsize=1024)
def kinds_of_blocks(cluster: Cluster, blocks: int) -> tuple[Devices, ...]:
    """Return the distinct devices of each of `blocks` equal blocks of consecutive ranks.

    Blocks with equal devices share one object.
    """
    if len({node.device for node in cluster.nodes}) == 1:
        return ((cluster.nodes[0].device,),) * blocks
    width = cluster.size // blocks
    starts = range(0, width * blocks, width)
    known: dict[frozenset[Device], Devices] = {}
    kinds = []
    for start in starts:
        devices = frozenset(cluster.devices[start : start + width])
        if devices not in known:
            known[devices] = tuple(sorted(devices, key=repr))
        kinds.append(known[devices])
    return tuple(kinds)


@lru_cache(maxsize=1024)
def different_kinds(cluster: Cluster, blocks: int) -> tuple[Devices, ...]:
    """Return the different results of `kinds_of_blocks`, in the order of their first occurrence."""
    return tuple(dict.fromkeys(kinds_of_blocks(cluster, blocks)))


def shares_of(devices: Iterable[Device], rows: Iterable[int]) -> Kind:
    """Return the kind of a block from the device and the rows of each of its ranks."""
    return tuple(sorted(set(map(RowShare, devices, rows)), key=repr))


MOST_ORDERS = 24


def node_orders(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the cluster in several orders of its nodes, or in all orders if these are few.

    In the first result, the fastest nodes come first.
    """
    if cluster.has_equal_nodes:
        return (cluster,)
    counts = Counter(cluster.nodes)
    kinds = sorted(counts, key=_fastest_first)
    return tuple(_ordered(cluster, nodes) for nodes in _orders(kinds, counts))


def _fastest_first(node: Machine) -> tuple[object, ...]:
    """Return a sort key for unlike nodes: the fastest first, then by memory, then by devices."""
    device = node.device
    return -half_peak(device), -device.memory_bytes, -node.devices, device.name, repr(node)


def half_peak(device: Device) -> float:
    """Return the 16-bit peak of a device, or its fp32 peak if it has no 16-bit units."""
    peaks = dict(device.peaks)
    return next(peaks[dtype] for dtype in ("bf16", "fp16", "fp32") if dtype in peaks)


def _orders(kinds: Sequence[Machine], counts: Counter[Machine]) -> Iterator[tuple[Machine, ...]]:
    """Yield every order of the nodes if these are few, else some with equal nodes side by side."""
    if _number(counts) <= MOST_ORDERS:
        yield from _every_order(counts, kinds)
        return
    alike = permutations(kinds) if factorial(len(kinds)) <= MOST_ORDERS else (kinds, kinds[::-1])
    for order in alike:
        yield tuple(node for kind in order for node in [kind] * counts[kind])


def _number(counts: Counter[Machine]) -> int:
    """Return the number of orders of these nodes; of many nodes, a number above MOST_ORDERS."""
    total = sum(counts.values())
    if total > MOST_ORDERS:
        return total
    return factorial(total) // prod(factorial(one) for one in counts.values())


def _every_order(
    counts: Counter[Machine], kinds: Sequence[Machine]
) -> Iterator[tuple[Machine, ...]]:
    if not counts.total():
        yield ()
    for kind in kinds:
        if counts[kind]:
            for rest in _every_order(counts - Counter([kind]), kinds):
                yield (kind, *rest)


def _ordered(cluster: Cluster, nodes: Sequence[Machine]) -> Cluster:
    """Return the cluster with its nodes in another order, on the same network."""
    outer = {level.name: level for level in cluster.levels if level.name in ("network", "rack")}
    network = outer["network"].units[0].link
    racks = None
    if "rack" in outer:
        racks = Racks(nodes=_nodes_per_rack(cluster), link=outer["rack"].units[0].link)
    return cluster_from(nodes, network=network, racks=racks, origin=cluster.origin)


def _nodes_per_rack(cluster: Cluster) -> int:
    """Return the number of nodes, or scale-up domains, in a rack; only the last may have fewer."""
    domains = next(level.units for level in cluster.levels if level.name == "node")
    first = next(level.units[0].ranks for level in cluster.levels if level.name == "network")
    joined = 0
    while first > 0:
        first -= domains[joined].ranks
        joined += 1
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossedLevel:
    """A level of links that a group crosses.

    The group has ranks in `parts` units of the level below, and `members` ranks in each.
    """

    level: str
    parts: int
    members: int
    bytes_per_second: float  # of a part in each direction, shared by its members, in long transfers
    port_bytes_per_second: float  # for one message of one rank
    alpha_seconds: float
    topology: Topology
    reduction_bytes_per_second: float  # of one part, if the switch sums; 0: it cannot
    backend: Backend
    collectives: tuple[MeasuredCollective, ...] = ()  # measured times of the link
    shared: float = 1.0  # rate of one group ÷ rate of one port; scales measured rates


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The levels that a group of ranks crosses, innermost first; none for a single rank."""

    ranks: int
    crossings: tuple[CrossedLevel, ...]

    @property
    def members_per_node(self) -> int:
        """Return how many ranks of the group share a scale-up domain."""
        outer = [crossing for crossing in self.crossings if crossing.level in ("network", "rack")]
        return outer[0].members if outer else self.ranks

    @property
    def nodes(self) -> int:
        """Return over how many scale-up domains the group is spread."""
        return -(-self.ranks // self.members_per_node)


@lru_cache(maxsize=4096)
def group_shape(cluster: Cluster, ranks: int, stride: int) -> GroupShape:
    """Return the shape of the groups of `ranks` ranks, `stride` apart, that tile the cluster.

    The groups run at once and share the links out of a node. On unequal nodes groups differ, and
    the worst one's shape is returned, because the others wait for it.
    """
    size, span = cluster.size, ranks * stride
    if ranks < 1 or stride < 1 or size % span:
        raise InputError(
            f"groups of {ranks} ranks with stride {stride} do not tile {size} devices",
            expected=f"ranks × stride divides {size}",
            fix="choose degrees whose product is the number of devices",
        )
    firsts = _different(
        cluster, (block + offset for block in range(0, size, span) for offset in range(stride))
    )
    return worst_shape(cluster, (range(first, first + span, stride) for first in firsts))


@lru_cache(maxsize=4096)
def neighbour_shape(cluster: Cluster, ranks: int, stride: int) -> GroupShape:
    """Return the worst shape of two neighbours in the groups of `group_shape`, such as stages."""
    span = ranks * stride
    group_shape(cluster, ranks, stride)  # raises if groups do not tile the cluster
    firsts = _different(
        cluster,
        (
            rank
            for block in range(0, cluster.size, span)
            for rank in range(block, block + span - stride)
        ),
    )
    return worst_shape(cluster, ((rank, rank + stride) for rank in firsts))


def ends_shape(cluster: Cluster, distance: int) -> GroupShape:
    """Return the worst shape of two ranks at this distance, such as the first and last stage."""
    firsts = _different(cluster, range(cluster.size - distance)) if distance else ()
    return worst_shape(cluster, ((rank, rank + distance) for rank in firsts))


def _different(cluster: Cluster, firsts: Iterable[int]) -> Iterable[int]:
    """Return the first rank of one group for each position within the cluster's period."""
    places = {first % cluster.period: first for first in firsts}
    return places.values()


def worst_shape(cluster: Cluster, groups: Iterable[Sequence[int]]) -> GroupShape:
    """Return the shape of the group with most nodes, then most levels, then narrowest links."""
    starts = [_starts(level) for level in cluster.levels]
    shapes = {_shape(cluster, starts, group) for group in groups}
    return max(shapes, key=_burden, default=GroupShape(ranks=1, crossings=()))


def _burden(shape: GroupShape) -> tuple[float, ...]:
    slowest = min((crossing.bytes_per_second for crossing in shape.crossings), default=float("inf"))
    return (shape.nodes, len(shape.crossings), -slowest)


def _starts(level: LinkLevel) -> list[int]:
    return [0, *accumulate(unit.ranks for unit in level.units)][:-1]


def _shape(cluster: Cluster, starts: Sequence[Sequence[int]], group: Sequence[int]) -> GroupShape:
    crossings: list[CrossedLevel] = []
    # rank → (its unit of the level below, the number of devices in that unit)
    below = {rank: (rank, 1) for rank in group}
    for level, level_starts in zip(cluster.levels, starts, strict=True):
        here = {rank: bisect_right(level_starts, rank) - 1 for rank in group}
        parts_of: dict[int, set[int]] = {}
        for rank in group:
            parts_of.setdefault(here[rank], set()).add(below[rank][0])
        parts = max(len(units) for units in parts_of.values())
        if parts > 1:
            members = max(Counter(below[rank][0] for rank in group).values())
            devices = min(below[rank][1] for rank in group)
            crossed = dict.fromkeys(
                level.units[unit] for unit in sorted(parts_of) if len(parts_of[unit]) > 1
            )
            crossings.append(
                _narrowest(
                    _crossing(
                        level.name,
                        unit.link,
                        parts=parts,
                        members=members,
                        devices=devices,
                        reach=unit.ranks / devices,
                    )
                    for unit in crossed
                )
            )
        below = {rank: (here[rank], level.units[here[rank]].ranks) for rank in group}
    return GroupShape(ranks=len(group), crossings=tuple(crossings))


def _narrowest(crossings: Iterable[CrossedLevel]) -> CrossedLevel:
    """Return the narrowest crossing, with the least rates and the longest latency of all."""
    every = tuple(crossings)
    return replace(
        min(every, key=lambda one: one.bytes_per_second),
        port_bytes_per_second=min(one.port_bytes_per_second for one in every),
        alpha_seconds=max(one.alpha_seconds for one in every),
        reduction_bytes_per_second=min(one.reduction_bytes_per_second for one in every),
    )


def _crossing(
    level: str,
    link: Link,
    *,
    parts: int,
    members: int,
    devices: int,
    reach: float,
) -> CrossedLevel:
    """Return the crossing with the rate of one group.

    A part (a unit of the level below) of d devices has d·r ports, r for each device. One group with
    m members in it uses at most m·max(1, r) of them, and the d ÷ m groups share all ports:

        ports = min(max(1, d·r) ÷ (d ÷ m), m·max(1, r))

    In a full mesh of u parts (`reach`), a group over p of them uses the links to p − 1 of the
    u − 1 others.
    """
    groups = max(1.0, devices / members)
    ratio = link.ports_per_device
    ports = min(max(1.0, devices * ratio) / groups, members * max(1.0, ratio))
    meshed = (parts - 1) / max(reach - 1, 1) if link.topology.has_own_links else 1.0
    rate = ports * link.bytes_per_second * min(1.0, meshed)
    single = 1 / max(reach - 1, 1) if link.topology.has_own_links else 1.0
    return CrossedLevel(
        level=level,
        parts=parts,
        members=members,
        bytes_per_second=rate * link.efficiency,
        port_bytes_per_second=min(ports, max(1.0, ratio))
        * link.bytes_per_second
        * link.efficiency
        * single,
        alpha_seconds=link.alpha_seconds,
        topology=link.topology,
        reduction_bytes_per_second=rate * link.reduction_efficiency,
        backend=link.backend,
        collectives=link.collectives,
        shared=rate / link.bytes_per_second,
    )
