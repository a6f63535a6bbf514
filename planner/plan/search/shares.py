"""Turns a batch and unlike devices into numbers of rows for each kind of device.

A step has m microbatches of B rows over all data ranks. Of these every device of kind k has r_k:

    Σ_k n_k · r_k  =  B        r_k ≥ 1

Where there are few such shares all are tried, else those in which the slowest kind is done first by
an estimate: the time of r rows as a line through that of an even share and of twice as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.device import Device
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.search.space import divisors

MOST_SHARES = 6
MOST_LISTED = 10_000

Rows = Mapping[Device, int]
Seconds = Callable[[Device, int], float]  # of so many rows, forward and backward


def uneven(
    point: Arrangement, cluster: Cluster, *, global_batch: int, least: int, seconds: Seconds
) -> Iterator[Arrangement]:
    """Yield a point of data ranks alone with rows that suit its unlike devices, if it has them.

    `least` are the rows that a microbatch has at least.
    """
    counts = Counter(cluster.devices)
    if len(counts) == 1 or point.data != cluster.size:
        return
    for microbatches in divisors(global_batch):
        for rows in _shares(counts, global_batch // microbatches, least, seconds):
            each = tuple(rows[device] for device in cluster.devices)
            yield replace(point, microbatch=max(each), microbatches=microbatches, rows=each)


def _shares(
    counts: Counter[Device], block: int, least: int, seconds: Seconds
) -> Iterator[Mapping[Device, int]]:
    """Yield the best shares of a block, but the even one."""
    found = [rows for rows in _every(counts, block, least) if len(set(rows.values())) > 1]
    if len(found) > MOST_SHARES:
        even = max(1, block // counts.total())
        times = {one: (seconds(one, even), seconds(one, 2 * even)) for one in counts}

        def slowest(rows: Rows) -> float:
            return max(
                once + (twice - once) * (rows[one] - even) / even
                for one, (once, twice) in times.items()
            )

        found = sorted(found, key=slowest)[:MOST_SHARES]
    yield from found


def _every(counts: Counter[Device], block: int, least: int) -> Iterator[Rows]:
    """Yield ways to share the rows of a block, up to a great many."""
    kinds = list(counts.items())

    def shared(place: int, left: int) -> Iterator[dict[Device, int]]:
        device, number = kinds[place]
        if place == len(kinds) - 1:
            if left % number == 0 and left >= least * number:
                yield {device: left // number}
            return
        later = least * sum(count for _, count in kinds[place + 1 :])
        for rows in range(least, (left - later) // number + 1):
            for rest in shared(place + 1, left - number * rows):
                yield {device: rows, **rest}

    for number, rows in enumerate(shared(0, block)):
        if number == MOST_LISTED:
            return
        yield rows
