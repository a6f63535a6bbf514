"""Prices a collective of a group: the cheapest algorithm, or a measured time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from autopar.planner.cluster.cluster import Collective, MeasuredCollective
from autopar.planner.cluster.shape import CrossedLevel, GroupShape
from autopar.planner.costs.collectives import algorithms as collectives
from autopar.planner.costs.collectives.algorithms import (
    CollectiveConstants,
    Protocol,
    read_collective_constants,
)


def measured_seconds(
    known: MeasuredCollective, payload_bytes: float, ranks: int, *, shared: float = 1.0
) -> float:
    """Return the seconds of a measured collective on `ranks` ranks.

    Measured times on m ranks are interpolated between payloads (a line on logarithmic scales). For
    n ranks they are changed by the line fitted to all payloads, L(S, n) = h_n·α + k_n·S ÷
    (β·shared), where h_n is `hops`, k_n is `sent_share`, and `shared` is `CrossedLevel.shared`:

        T(S, n) = T(S, m) + L(S, n) − L(S, m)     if L(S, n) ≥ L(S, m)
        T(S, n) = T(S, m) · L(S, n) ÷ L(S, m)     otherwise

    The library's own overhead is part of the measurement, so it is not added. Leaves out that a
    library may choose another algorithm for more ranks.
    """
    seconds = _interpolated(known.points, payload_bytes)
    if ranks == known.ranks and shared == 1.0:
        return seconds
    here = _line(known, payload_bytes, ranks, shared)
    there = _line(known, payload_bytes, known.ranks, 1.0)
    return seconds + here - there if here >= there else seconds * here / there


def least_seconds_per_byte(known: MeasuredCollective, ranks: int, *, shared: float = 1.0) -> float:
    """Return the least time per byte over all payloads; see `measured_seconds`.

    Between two measured payloads the time per byte lies between theirs, so only these are compared.
    """
    least = min(seconds / size for size, seconds in known.points)
    collective = known.collective
    here = sent_share(collective, ranks) / shared
    there = sent_share(collective, known.ranks)
    if ranks >= known.ranks:
        return least + max(0.0, here - there) / known.bytes_per_second
    latency = hops(collective, ranks) / hops(collective, known.ranks)
    return least * min(1.0, latency, here / there)


def _line(known: MeasuredCollective, payload_bytes: float, ranks: int, shared: float) -> float:
    collective = known.collective
    wire = sent_share(collective, ranks) * payload_bytes / (known.bytes_per_second * shared)
    return hops(collective, ranks) * known.alpha_seconds + wire


def hops(collective: Collective, ranks: int) -> int:
    """Return the number of sequential latencies: hops of a ring, or messages to other ranks."""
    if collective is Collective.POINT_TO_POINT:
        return 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1)


def sent_share(collective: Collective, ranks: int) -> float:
    """Return the share of the payload that each rank sends."""
    if collective in (Collective.POINT_TO_POINT, Collective.BROADCAST):
        return 1.0
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def _interpolated(points: tuple[tuple[int, float], ...], payload_bytes: float) -> float:
    """Return the seconds of a payload.

    Below the smallest measured payload the time is constant; above the largest it is proportional.
    """
    after = bisect_left([size for size, _ in points], payload_bytes)
    if after == 0:
        return points[0][1]
    if after == len(points):
        last_bytes, last_seconds = points[-1]
        return last_seconds * payload_bytes / last_bytes
    (low, low_seconds), (high, high_seconds) = points[after - 1], points[after]
    place = math.log(payload_bytes / low) / math.log(high / low)
    return low_seconds * math.exp(place * math.log(high_seconds / low_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAlgorithm:
    """An algorithm for a collective, and its time."""

    seconds: float
    algorithm: str
    protocol: str


FREE = PricedAlgorithm(seconds=0.0, algorithm="nothing", protocol="none")


@lru_cache(maxsize=65536)
def collective_seconds(collective: Collective, payload_bytes: float, shape: GroupShape) -> float:
    """Return the time of the cheapest algorithm for a collective. Cached."""
    return cheapest(collective, payload_bytes, shape).seconds


@lru_cache(maxsize=65536)
def least_seconds(collective: Collective, payload_bytes: float, shape: GroupShape) -> float:
    """Return the least time to move a payload, in any number of collectives.

    The formulas are concave in the payload, so one collective takes the least time. Measured times
    need not be concave.
    """
    measured = _measured(collective, shape)
    if measured is None or shape.ranks == 1:
        return collective_seconds(collective, payload_bytes, shape)
    known, crossing = measured
    return payload_bytes * least_seconds_per_byte(known, shape.ranks, shared=crossing.shared)


def cheapest(collective: Collective, payload_bytes: float, shape: GroupShape) -> PricedAlgorithm:
    """Return the cheapest algorithm that the topology allows; ties go to the first one."""
    if shape.ranks == 1 or not payload_bytes:
        return FREE
    return min(ways(collective, payload_bytes, shape), key=lambda way: way.seconds)


def ways(
    collective: Collective,
    payload_bytes: float,
    shape: GroupShape,
    constants: CollectiveConstants | None = None,
) -> tuple[PricedAlgorithm, ...]:
    """Return the measured time, or every algorithm that the topology allows, with its time."""
    measured = _measured(collective, shape)
    if measured is not None:
        known, crossing = measured
        seconds = measured_seconds(known, payload_bytes, shape.ranks, shared=crossing.shared)
        return (PricedAlgorithm(seconds=seconds, algorithm="as measured", protocol="as measured"),)
    constants = constants or read_collective_constants()
    return tuple(
        way
        for protocol in constants.protocols(shape.crossings[-1].backend)
        if protocol.crosses_networks or shape.nodes == 1
        for way in _priced(
            collective,
            _Sent(payload_bytes=payload_bytes, shape=shape, protocol=protocol, constants=constants),
        )
    )


def _measured(
    collective: Collective, shape: GroupShape
) -> tuple[MeasuredCollective, CrossedLevel] | None:
    """Return the measurement of a collective; groups over several levels are not measured."""
    if len(shape.crossings) != 1:
        return None
    crossing = shape.crossings[0]
    known = next((one for one in crossing.collectives if one.collective == collective), None)
    return None if known is None else (known, crossing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The payload of a group, and the protocol with which it is sent."""

    payload_bytes: float
    shape: GroupShape
    protocol: Protocol
    constants: CollectiveConstants

    def hop_seconds(self, crossing: CrossedLevel) -> float:
        """Return the latency of one hop over a link."""
        return self.protocol.hop(crossing.alpha_seconds)

    def chain_seconds(self, crossing: CrossedLevel) -> float:
        """Return the latency of going once through all parts of a level."""
        return (crossing.parts - 1) * self.hop_seconds(crossing)


# an algorithm, its time without the `base_seconds` of the protocol, and that time without latency
_Timed = tuple[str, float, float]


def _priced(collective: Collective, message: _Sent) -> Iterator[PricedAlgorithm]:
    """Yield the times of algorithms with one protocol.

    T = base + t + √(ρ·W): t is the algorithm's time, W is that time without latency. A payload cut
    into m chunks pays one chunk's time W/m to fill the pipe and an overhead c for each, m·c; the
    best m leaves 2·√(c·W), hence the root. ρ is fitted, and 0 for a protocol that does not hand on
    chunks. Leaves out that the library takes its chunk sizes from fixed tables.
    """
    protocol = message.protocol
    ramp_seconds = message.constants.chunk_ramp_seconds if protocol.hands_on_chunks else 0.0
    for algorithm, seconds, wire_seconds in _times(collective, message):
        yield PricedAlgorithm(
            seconds=protocol.base_seconds + seconds + math.sqrt(ramp_seconds * wire_seconds),
            algorithm=algorithm,
            protocol=protocol.name,
        )


def _times(collective: Collective, message: _Sent) -> Iterator[_Timed]:
    """Yield each algorithm with its times."""
    if collective is Collective.POINT_TO_POINT:
        yield _point_to_point(message)
    elif collective is Collective.ALL_TO_ALL:
        yield _all_to_all(message)
    else:
        yield _ring(collective, message)
        has_trees = all(crossing.topology.has_trees for crossing in message.shape.crossings)
        if has_trees and not message.protocol.rings_only:
            yield from _tree(collective, message)


def ring_hops(shape: GroupShape) -> tuple[int, ...]:
    """Return how many of a ring's n − 1 hops cross each level."""
    units = [
        shape.ranks,
        *(-(-shape.ranks // (one.members * one.parts)) for one in shape.crossings),
    ]
    return tuple(inner - outer for inner, outer in pairwise(units))


def _ring(collective: Collective, message: _Sent) -> _Timed:
    """Return the times of a ring over all levels, at the rate of the narrowest cut.

    Each round waits for the latency of n − 1 hops; an all-reduce has two rounds. A broadcast passes
    the tensor down a chain in small chunks, which takes S/β. Leaves out the filling of the chain.
    """
    shape, protocol, payload_bytes = message.shape, message.protocol, message.payload_bytes
    hops_seconds = sum(
        count * message.hop_seconds(crossing)
        for count, crossing in zip(ring_hops(shape), shape.crossings, strict=True)
    )
    share = message.constants.ring_share(protocol, collective, shape.ranks)
    rate = share * min(crossing.bytes_per_second for crossing in shape.crossings)
    is_double = all(crossing.topology.ring_directions == 2 for crossing in shape.crossings)
    name, of_ring = ("double ring", payload_bytes / 2) if is_double else ("ring", payload_bytes)
    if collective is Collective.BROADCAST:
        wire = payload_bytes / rate
    elif collective is Collective.ALL_REDUCE or (
        collective is Collective.REDUCE_SCATTER and protocol.scatters_whole
    ):
        wire = collectives.ring_all_reduce_seconds(of_ring, shape.ranks, rate=rate)
        hops_seconds *= 2
    else:
        wire = collectives.ring_all_gather_seconds(of_ring, shape.ranks, rate=rate)
    return name, hops_seconds + wire, wire


def _tree(collective: Collective, message: _Sent) -> Iterator[_Timed]:
    """Yield the times of trees between nodes; in each node is a chain or a summing switch.

    A broadcast goes down the trees with half of the tensor on each: an inner node sends each half
    to two children, S in all. An all-reduce also goes up. If a switch in the node sums, nodes and
    trees work at once, chunk by chunk, so that the slower of both counts. Leaves out the filling of
    pipelines.
    """
    shape, protocol, constants = message.shape, message.protocol, message.constants
    node, *outer = shape.crossings
    depth = _tree_depth_seconds(message)
    rate = protocol.fraction * constants.tree_fraction
    if collective is Collective.BROADCAST:
        narrowest = rate * min(crossing.bytes_per_second for crossing in shape.crossings)
        wire = message.payload_bytes / narrowest
        yield "tree", depth + wire, wire
    if collective is not Collective.ALL_REDUCE:
        return
    wires = [
        collectives.tree_all_reduce_seconds(
            message.payload_bytes, rate=rate * crossing.bytes_per_second, units=crossing.parts
        )
        for crossing in shape.crossings
    ]
    yield "tree", 2 * depth + max(wires), max(wires)
    sums_in_switch = node.reduction_bytes_per_second > 0 and node.level not in ("network", "rack")
    if not sums_in_switch or not protocol.hands_on_chunks:  # NCCL sends whole chunks to the switch
        return
    inside = collectives.in_switch_all_reduce_seconds(
        message.payload_bytes,
        node.parts,
        rate=protocol.fraction * node.reduction_bytes_per_second,
    )
    setup = constants.in_switch_seconds + 2 * message.hop_seconds(node)
    if not outer:
        yield "in-switch", setup + inside, inside
        return
    wire = max(inside, *wires[1:])
    climb = depth - message.chain_seconds(node)
    yield "in-switch and tree", setup + 2 * climb + wire, wire


def _tree_depth_seconds(message: _Sent) -> float:
    """Return the latency from the farthest leaf to the root: through its node, up the trees."""
    seconds = 0.0
    for crossing in message.shape.crossings:
        if crossing.level in ("network", "rack"):
            hop = message.constants.tree_hop(message.protocol, crossing.alpha_seconds)
            seconds += collectives.tree_depth(crossing.parts) * hop
        else:
            seconds += message.chain_seconds(crossing)
    return seconds


def _point_to_point(message: _Sent) -> _Timed:
    """Return the times of one message: T = α + S/β. Leaves out waiting for the receiver."""
    crossing = message.shape.crossings[-1]
    share = message.protocol.fraction * message.constants.point_to_point_fraction
    wire = message.payload_bytes / (share * crossing.port_bytes_per_second)
    return "direct", message.hop_seconds(crossing) + wire, wire


def _all_to_all(message: _Sent) -> _Timed:
    """Return the times at the slowest cut: all pieces for ranks behind a cut cross it."""
    every = [_across(message, crossing) for crossing in message.shape.crossings]
    name, seconds, _ = max(every, key=lambda one: one[1])
    return name, seconds, max(wire for _, _, wire in every)


def _across(message: _Sent, crossing: CrossedLevel) -> _Timed:
    """Return the times of an all-to-all as if only this level limited it.

    On a ring, pieces wait for the hops of the whole ring. Otherwise n − 1 messages start one after
    another.
    """
    ranks, share = message.shape.ranks, message.constants.all_to_all_share(message.protocol)
    rate = share * crossing.bytes_per_second / crossing.members
    if directions := crossing.topology.ring_directions:
        is_double = directions == 2
        ring = (
            collectives.double_ring_all_to_all_seconds
            if is_double
            else collectives.ring_all_to_all_seconds
        )
        wire = ring(message.payload_bytes, crossing.parts, rate=rate)
        name = "double ring" if is_double else "ring"
        return name, message.chain_seconds(crossing) + wire, wire
    outside = ranks - crossing.members
    wire = collectives.all_to_all_seconds(
        message.payload_bytes, ranks, peers_outside=outside, rate=rate
    )
    return "direct", (ranks - 1) * message.hop_seconds(crossing) + wire, wire
