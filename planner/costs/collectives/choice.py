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
    without_latency,
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
    collective: Collective, payload_bytes: float, shape: GroupShape
) -> tuple[PricedAlgorithm, ...]:
    """Return every algorithm that the topology allows, with its time."""
    measured = _as_measured(collective, payload_bytes, shape)
    if measured is not None:
        return (measured,)
    known = read_collective_constants()
    backend = shape.crossings[-1].backend
    return tuple(
        way
        for protocol in known.protocols(backend)
        if protocol.crosses_networks or shape.nodes == 1
        for way in _priced(collective, payload_bytes, shape, protocol, known)
    )


def _as_measured(
    collective: Collective, payload_bytes: float, shape: GroupShape
) -> PricedAlgorithm | None:
    """Return the measured time, or None."""
    measured = _measured(collective, shape)
    if measured is None:
        return None
    known, crossing = measured
    seconds = measured_seconds(known, payload_bytes, shape.ranks, shared=crossing.shared)
    return PricedAlgorithm(seconds=seconds, algorithm="as measured", protocol="as measured")


def _measured(
    collective: Collective, shape: GroupShape
) -> tuple[MeasuredCollective, CrossedLevel] | None:
    """Return the measurement of a collective; groups over several levels are not measured."""
    if len(shape.crossings) != 1:
        return None
    crossing = shape.crossings[0]
    known = next((one for one in crossing.collectives if one.collective == collective), None)
    return None if known is None else (known, crossing)


def _priced(
    collective: Collective,
    payload_bytes: float,
    shape: GroupShape,
    protocol: Protocol,
    constants: CollectiveConstants,
) -> Iterator[PricedAlgorithm]:
    """Yield the times of algorithms with one protocol.

    T = base + t + √(ρ·W): t is the formula's time, W is that time without latency. A payload cut
    into m chunks pays one chunk's time W/m to fill the pipe and an overhead c for each, m·c; the
    best m leaves 2·√(c·W), hence the root. ρ is fitted, and 0 for a protocol that does not hand on
    chunks. Leaves out that the library takes its chunk sizes from fixed tables.
    """
    timed = _times(collective, payload_bytes, shape, protocol, constants)
    wires = _times(collective, payload_bytes, shape, *without_latency(protocol, constants))
    ramp_seconds = constants.chunk_ramp_seconds if protocol.hands_on_chunks else 0.0
    for (algorithm, seconds), (_, wire_seconds) in zip(timed, wires, strict=True):
        yield PricedAlgorithm(
            seconds=protocol.base_seconds + seconds + math.sqrt(ramp_seconds * wire_seconds),
            algorithm=algorithm,
            protocol=protocol.name,
        )


def _times(
    collective: Collective,
    payload_bytes: float,
    shape: GroupShape,
    protocol: Protocol,
    constants: CollectiveConstants,
) -> Iterator[tuple[str, float]]:
    """Yield each algorithm's name and its time, without the `base` of the protocol."""
    if collective is Collective.POINT_TO_POINT:
        yield "direct", _point_to_point(payload_bytes, shape, protocol, constants)
    elif collective is Collective.ALL_TO_ALL:
        yield _all_to_all(payload_bytes, shape, protocol, constants)
    else:
        yield _ring(collective, payload_bytes, shape, protocol, constants)
        if not protocol.rings_only and all(
            crossing.topology.has_trees for crossing in shape.crossings
        ):
            yield from _tree(collective, payload_bytes, shape, protocol, constants)


def ring_hops(shape: GroupShape) -> tuple[int, ...]:
    """Return how many of a ring's n − 1 hops cross each level."""
    units = [
        shape.ranks,
        *(-(-shape.ranks // (one.members * one.parts)) for one in shape.crossings),
    ]
    return tuple(inner - outer for inner, outer in pairwise(units))


def _ring(
    collective: Collective,
    payload_bytes: float,
    shape: GroupShape,
    protocol: Protocol,
    constants: CollectiveConstants,
) -> tuple[str, float]:
    """Return the name and time of a ring over all levels, at the rate of the narrowest cut."""
    hops = sum(
        count * protocol.hop(crossing.alpha_seconds)
        for count, crossing in zip(ring_hops(shape), shape.crossings, strict=True)
    )
    share = constants.ring_share(protocol, collective, shape.ranks)
    rate = share * min(crossing.bytes_per_second for crossing in shape.crossings)
    is_double = all(crossing.topology.ring_directions == 2 for crossing in shape.crossings)
    if collective is Collective.REDUCE_SCATTER and protocol.scatters_whole:
        collective = Collective.ALL_REDUCE
    formulas = {
        (Collective.ALL_REDUCE, False): collectives.ring_all_reduce_seconds,
        (Collective.ALL_REDUCE, True): collectives.double_ring_all_reduce_seconds,
        (Collective.ALL_GATHER, False): collectives.ring_all_gather_seconds,
        (Collective.ALL_GATHER, True): collectives.double_ring_all_gather_seconds,
        (Collective.REDUCE_SCATTER, False): collectives.ring_all_gather_seconds,
        (Collective.REDUCE_SCATTER, True): collectives.double_ring_all_gather_seconds,
        (Collective.BROADCAST, False): collectives.chain_broadcast_seconds,
        (Collective.BROADCAST, True): collectives.chain_broadcast_seconds,
    }
    seconds = formulas[collective, is_double](
        payload_bytes, shape.ranks, rate=rate, hops_seconds=hops
    )
    return ("double ring" if is_double else "ring"), seconds


def _tree(
    collective: Collective,
    payload_bytes: float,
    shape: GroupShape,
    protocol: Protocol,
    constants: CollectiveConstants,
) -> Iterator[tuple[str, float]]:
    """Yield names and times of trees between nodes; in each node is a chain or a summing switch."""
    node, *outer = shape.crossings
    depth = _tree_depth_seconds(shape, protocol, constants)
    rate = protocol.fraction * constants.tree_fraction
    if collective is Collective.BROADCAST:
        narrowest = rate * min(crossing.bytes_per_second for crossing in shape.crossings)
        yield (
            "tree",
            collectives.tree_broadcast_seconds(
                payload_bytes, shape.ranks, rate=narrowest, depth_seconds=depth
            ),
        )
    if collective is not Collective.ALL_REDUCE:
        return
    slowest = max(
        _tree_wire_seconds(payload_bytes, shape.ranks, crossing, rate)
        for crossing in shape.crossings
    )
    yield "tree", 2 * depth + slowest
    sums_in_switch = node.reduction_bytes_per_second > 0 and node.level not in ("network", "rack")
    if not sums_in_switch or not protocol.hands_on_chunks:  # NCCL sends whole chunks to the switch
        return
    inside = collectives.in_switch_all_reduce_seconds(
        payload_bytes,
        node.parts,
        rate=protocol.fraction * node.reduction_bytes_per_second,
        setup_seconds=0.0,
    )
    setup = constants.in_switch_seconds + 2 * protocol.hop(node.alpha_seconds)
    if not outer:
        yield "in-switch", setup + inside
        return
    between = max(
        _tree_wire_seconds(payload_bytes, shape.ranks, crossing, rate) for crossing in outer
    )
    climb = depth - _chain_seconds(node, protocol)
    yield (
        "in-switch and tree",
        collectives.pipelined_hierarchical_all_reduce_seconds(
            inside, between, latency_seconds=setup + 2 * climb
        ),
    )


def _tree_wire_seconds(
    payload_bytes: float, ranks: int, crossing: CrossedLevel, rate: float
) -> float:
    return collectives.tree_all_reduce_seconds(
        payload_bytes,
        ranks,
        rate=rate * crossing.bytes_per_second,
        units=crossing.parts,
        depth_seconds=0.0,
    )


def _tree_depth_seconds(
    shape: GroupShape, protocol: Protocol, constants: CollectiveConstants
) -> float:
    """Return the latency from the farthest leaf to the root: through its node, up the trees."""
    seconds = 0.0
    for crossing in shape.crossings:
        if crossing.level in ("network", "rack"):
            hop = constants.tree_hop(protocol, crossing.alpha_seconds)
            seconds += collectives.tree_depth(crossing.parts) * hop
        else:
            seconds += _chain_seconds(crossing, protocol)
    return seconds


def _chain_seconds(crossing: CrossedLevel, protocol: Protocol) -> float:
    return (crossing.parts - 1) * protocol.hop(crossing.alpha_seconds)


def _point_to_point(
    payload_bytes: float, shape: GroupShape, protocol: Protocol, constants: CollectiveConstants
) -> float:
    crossing = shape.crossings[-1]
    return collectives.point_to_point_seconds(
        payload_bytes,
        rate=protocol.fraction * constants.point_to_point_fraction * crossing.port_bytes_per_second,
        hop_seconds=protocol.hop(crossing.alpha_seconds),
    )


def _all_to_all(
    payload_bytes: float, shape: GroupShape, protocol: Protocol, constants: CollectiveConstants
) -> tuple[str, float]:
    """Return the name and time at the slowest cut: all pieces for ranks behind a cut cross it."""
    return max(
        (_across(payload_bytes, shape, one, protocol, constants) for one in shape.crossings),
        key=lambda it: it[1],
    )


def _across(
    payload_bytes: float,
    shape: GroupShape,
    crossing: CrossedLevel,
    protocol: Protocol,
    constants: CollectiveConstants,
) -> tuple[str, float]:
    """Return the name and time of an all-to-all as if only this level limited it."""
    share = constants.all_to_all_share(protocol)
    rate = share * crossing.bytes_per_second / crossing.members
    hop = protocol.hop(crossing.alpha_seconds)
    if directions := crossing.topology.ring_directions:
        is_double = directions == 2
        ring = (
            collectives.double_ring_all_to_all_seconds
            if is_double
            else collectives.ring_all_to_all_seconds
        )
        seconds = ring(
            payload_bytes, crossing.parts, rate=rate, hops_seconds=(crossing.parts - 1) * hop
        )
        return ("double ring" if is_double else "ring"), seconds
    outside = shape.ranks - crossing.members
    seconds = collectives.all_to_all_seconds(
        payload_bytes, shape.ranks, peers_outside=outside, rate=rate, hop_seconds=hop
    )
    return "direct", seconds
