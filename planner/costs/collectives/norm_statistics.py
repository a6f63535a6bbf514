"""Prices batch norms that are synchronised: each sees the rows of all ranks that share the data.

    forward    every rank's means, variances and number of rows are gathered
    backward   two sums for each channel are added up; what runs again gathers again

The layer waits for both. Beside them the host dispatches ops that are too small for the device to
take time, where it does not run ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from autopar.planner.cluster.link import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds

_ELEMENT_BYTES = 4  # statistics travel in fp32
# Of runtime/data_parallel/batch_norm.py, beside what a local norm takes.
_FORWARD_OPS, _BACKWARD_OPS = 22, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The batch norms of some layers, each by its channels on one rank."""

    norms: tuple[int, ...] = ()
    again: tuple[int, ...] = ()  # those that run again in the backward
    dispatch_seconds: float = 0.0  # of one small op


NO_STATISTICS = Statistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronising:
    """What one microbatch waits for in each pass, and how many collectives of how many bytes."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    collectives: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Synchronising) -> Synchronising:
        """Return both, one after the other."""
        return Synchronising(
            forward_seconds=self.forward_seconds + other.forward_seconds,
            backward_seconds=self.backward_seconds + other.backward_seconds,
            collectives=self.collectives + other.collectives,
            payload_bytes=self.payload_bytes + other.payload_bytes,
        )


NO_WAIT = Synchronising()


@lru_cache(maxsize=4096)
def synchronising(statistics: Statistics, group: GroupShape) -> Synchronising:
    """Return what a layer waits for where so many ranks share the data."""
    if group.ranks == 1 or not statistics.norms:
        return NO_WAIT
    gathered = [_gathered_bytes(channels, group) for channels in statistics.norms]
    again = [_gathered_bytes(channels, group) for channels in statistics.again]
    summed = [2 * channels * _ELEMENT_BYTES for channels in statistics.norms]
    forward_ops = _FORWARD_OPS * statistics.dispatch_seconds
    backward_ops = _BACKWARD_OPS * statistics.dispatch_seconds
    return Synchronising(
        forward_seconds=_seconds(Collective.ALL_GATHER, gathered, group)
        + len(gathered) * forward_ops,
        backward_seconds=_seconds(Collective.ALL_REDUCE, summed, group)
        + _seconds(Collective.ALL_GATHER, again, group)
        + len(summed) * backward_ops
        + len(again) * forward_ops,
        collectives=len(gathered) + len(summed) + len(again),
        payload_bytes=sum((*gathered, *summed, *again)),
    )


def _gathered_bytes(channels: int, group: GroupShape) -> int:
    return (2 * channels + 1) * _ELEMENT_BYTES * group.ranks


def _seconds(collective: Collective, payloads: Iterable[int], group: GroupShape) -> float:
    return sum(collective_seconds(collective, size, group) for size in payloads)
