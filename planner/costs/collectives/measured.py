"""Turns the measured seconds of a collective into those of another payload and number of ranks."""

from __future__ import annotations

import math
from bisect import bisect_left

from autopar.planner.cluster.link import Collective, MeasuredCollective


def measured_seconds(
    known: MeasuredCollective, payload_bytes: float, ranks: int, *, shared: float = 1.0
) -> float:
    """Return the seconds of a collective that was measured, on so many ranks.

    As measured on m ranks (between two payloads a straight line on logarithmic scales), and changed
    as the line fitted to all payloads, L(S, n) = h_n·α + k_n·S ÷ (β·shared), says:

        T(S, n) = T(S, m) + L(S, n) − L(S, m)     on as many ranks or more
        T(S, n) = T(S, m) · L(S, n) ÷ L(S, m)     on fewer

    The library's own overheads are in what was measured, so nothing is added. Leaves out that a
    library may choose another algorithm for more ranks.
    """
    seconds = _interpolated(known.points, payload_bytes)
    if ranks == known.ranks and shared == 1.0:
        return seconds
    here = _line(known, payload_bytes, ranks, shared)
    there = _line(known, payload_bytes, known.ranks, 1.0)
    return seconds + here - there if here >= there else seconds * here / there


def least_seconds_per_byte(known: MeasuredCollective, ranks: int, *, shared: float = 1.0) -> float:
    """Return what a byte takes at least, in whatever payload; see `measured_seconds`.

    Between two measured payloads it lies between what it takes in these.
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
    """Return the latencies that a ring, or direct messages to all others, pay one after another."""
    if collective is Collective.POINT_TO_POINT:
        return 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1)


def sent_share(collective: Collective, ranks: int) -> float:
    """Return the share of the payload that each rank sends."""
    if collective in (Collective.POINT_TO_POINT, Collective.BROADCAST):
        return 1.0
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def _interpolated(points: tuple[tuple[int, float], ...], payload_bytes: float) -> float:
    """Return the seconds at a payload; less than the least takes as long, more than the most
    takes as much longer as it is larger."""
    after = bisect_left([size for size, _ in points], payload_bytes)
    if after == 0:
        return points[0][1]
    if after == len(points):
        last_bytes, last_seconds = points[-1]
        return last_seconds * payload_bytes / last_bytes
    (low, low_seconds), (high, high_seconds) = points[after - 1], points[after]
    place = math.log(payload_bytes / low) / math.log(high / low)
    return low_seconds * math.exp(place * math.log(high_seconds / low_seconds))
