"""Tells which levels of links the traffic of a group crosses and what rate it gets there."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from autopar.planner.cluster.cluster import Cluster, Level
from autopar.planner.cluster.link import Backend, Link, MeasuredCollective, Topology
from autopar.planner.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One level that a group crosses: `parts` units of the level below, `members` ranks in each."""

    level: str
    parts: int
    members: int
    bytes_per_second: (
        float  # that the group gets in and out of one part, each way, over long transfers
    )
    port_bytes_per_second: float  # that one message of one rank gets
    alpha_seconds: float
    topology: Topology
    reduction_bytes_per_second: float  # of one part, when the switch sums; 0: it cannot
    backend: Backend
    collectives: tuple[MeasuredCollective, ...] = ()  # where the link was measured
    shared: float = 1.0  # of what was measured, the rate that one group gets


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The levels that a group of ranks crosses, innermost first; none for a single rank."""

    ranks: int
    crossings: tuple[Crossing, ...]

    @property
    def members_per_node(self) -> int:
        """Return how many ranks of the group share a scale-up domain."""
        outer = [crossing for crossing in self.crossings if crossing.level in ("network", "rack")]
        return outer[0].members if outer else self.ranks

    @property
    def nodes(self) -> int:
        """Return over how many scale-up domains the group spreads."""
        return -(-self.ranks // self.members_per_node)


@lru_cache(maxsize=4096)
def group_shape(
    cluster: Cluster, ranks: int, stride: int, *, concurrent: int | None = None
) -> GroupShape:
    """Return the shape of the groups of `ranks` ranks, `stride` apart, that tile the cluster.

    The groups of a mesh axis all run at once and share the links out of a node, unless `concurrent`
    says how many do. Where groups lie differently (unequal nodes), the shape is that of the worst
    one: it makes the others wait.
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
    return worst_shape(
        cluster, (range(first, first + span, stride) for first in firsts), concurrent=concurrent
    )


@lru_cache(maxsize=4096)
def neighbour_shape(
    cluster: Cluster, ranks: int, stride: int, *, concurrent: int | None = None
) -> GroupShape:
    """Return the worst shape of two neighbours in such groups, as of pipeline stages."""
    span = ranks * stride
    group_shape(cluster, ranks, stride)  # refuses what does not tile the cluster
    firsts = _different(
        cluster,
        (
            rank
            for block in range(0, cluster.size, span)
            for rank in range(block, block + span - stride)
        ),
    )
    return worst_shape(cluster, ((rank, rank + stride) for rank in firsts), concurrent=concurrent)


def ends_shape(cluster: Cluster, distance: int) -> GroupShape:
    """Return the worst shape of two ranks so far apart, as of the first and the last stage."""
    firsts = _different(cluster, range(cluster.size - distance)) if distance else ()
    return worst_shape(cluster, ((rank, rank + distance) for rank in firsts))


def _different(cluster: Cluster, firsts: Iterable[int]) -> Iterable[int]:
    """Return one first rank of the groups that lie alike on machines that repeat."""
    places = {first % cluster.period: first for first in firsts}
    return places.values()


def worst_shape(
    cluster: Cluster, groups: Iterable[Sequence[int]], *, concurrent: int | None = None
) -> GroupShape:
    """Return the shape of the group with most nodes, then most levels, then narrowest links."""
    starts = [_starts(level) for level in cluster.levels]
    shapes = {_shape(cluster, starts, group, concurrent) for group in groups}
    return max(shapes, key=_burden, default=GroupShape(ranks=1, crossings=()))


def _burden(shape: GroupShape) -> tuple[float, ...]:
    slowest = min((crossing.bytes_per_second for crossing in shape.crossings), default=float("inf"))
    return (shape.nodes, len(shape.crossings), -slowest)


def _starts(level: Level) -> list[int]:
    return [0, *accumulate(unit.ranks for unit in level.units)][:-1]


def _shape(
    cluster: Cluster, starts: Sequence[Sequence[int]], group: Sequence[int], concurrent: int | None
) -> GroupShape:
    crossings: list[Crossing] = []
    below = {
        rank: (rank, 1) for rank in group
    }  # rank → (its unit of the level below, devices in that unit)
    for level, level_starts in zip(cluster.levels, starts, strict=True):
        here = {rank: bisect_right(level_starts, rank) - 1 for rank in group}
        parts_of: dict[int, set[int]] = {}
        for rank in group:
            parts_of.setdefault(here[rank], set()).add(below[rank][0])
        parts = max(len(units) for units in parts_of.values())
        if parts > 1:
            members = _most_common_size(below[rank][0] for rank in group)
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
                        concurrent=concurrent,
                    )
                    for unit in crossed
                )
            )
        below = {rank: (here[rank], level.units[here[rank]].ranks) for rank in group}
    return GroupShape(ranks=len(group), crossings=tuple(crossings))


def _narrowest(crossings: Iterable[Crossing]) -> Crossing:
    """Return the crossing of the narrowest of some units' links, with the longest latency."""
    every = tuple(crossings)
    return replace(
        min(every, key=lambda one: one.bytes_per_second),
        port_bytes_per_second=min(one.port_bytes_per_second for one in every),
        alpha_seconds=max(one.alpha_seconds for one in every),
        reduction_bytes_per_second=min(one.reduction_bytes_per_second for one in every),
    )


def _most_common_size(units: Iterable[int]) -> int:
    sizes: dict[int, int] = {}
    for unit in units:
        sizes[unit] = sizes.get(unit, 0) + 1
    return max(sizes.values())


def _crossing(
    level: str,
    link: Link,
    *,
    parts: int,
    members: int,
    devices: int,
    reach: float,
    concurrent: int | None,
) -> Crossing:
    """Return the crossing with the rate of one group.

    A part of d devices has d·r ports (r ports per device). One group with m members there drives at
    most m·max(1, r) of them, and c groups at once share all: ports = min(d·r ÷ c, m·max(1, r)); c
    is d ÷ m when every device takes part. In a full mesh of u parts, a group over p of them has the
    links to p − 1 of the u − 1 others.
    """
    groups = concurrent if concurrent is not None else max(1.0, devices / members)
    ratio = link.ports_per_device
    ports = min(max(1.0, devices * ratio) / groups, members * max(1.0, ratio))
    meshed = (parts - 1) / max(reach - 1, 1) if link.topology is Topology.MESH else 1.0
    rate = ports * link.bytes_per_second * min(1.0, meshed)
    single = 1 / max(reach - 1, 1) if link.topology is Topology.MESH else 1.0
    return Crossing(
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
