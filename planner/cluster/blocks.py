"""Tells which kinds of devices hold the ranks of each block, as of one rank of a pipeline."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.device import Device

Devices = tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A device, and how many rows of a microbatch it has."""

    device: Device
    rows: int


Kind = tuple[Share, ...]  # what differs among the ranks of a block, which wait for each other


@lru_cache(maxsize=1024)
def kinds_of_blocks(cluster: Cluster, blocks: int) -> tuple[Devices, ...]:
    """Return the kind of each of so many equal blocks of consecutive ranks; one object if equal."""
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
    """Return the kinds of blocks that differ, in the order of the first of each."""
    return tuple(dict.fromkeys(kinds_of_blocks(cluster, blocks)))


def shares_of(devices: Iterable[Device], rows: Iterable[int]) -> Kind:
    """Return what differs among devices that have so many rows each."""
    return tuple(sorted(set(map(Share, devices, rows)), key=repr))
