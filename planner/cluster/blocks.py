"""Tells which kinds of devices hold the ranks of each block, as of one rank of a pipeline."""

from functools import lru_cache

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.device import Device

Kind = tuple[Device, ...]  # the different devices of a block, which wait for each other


@lru_cache(maxsize=1024)
def kinds_of_blocks(cluster: Cluster, blocks: int) -> tuple[Kind, ...]:
    """Return the kind of each of so many equal blocks of consecutive ranks; one object if equal."""
    if len({node.device for node in cluster.nodes}) == 1:
        return ((cluster.nodes[0].device,),) * blocks
    width = cluster.size // blocks
    starts = range(0, width * blocks, width)
    known: dict[frozenset[Device], Kind] = {}
    kinds = []
    for start in starts:
        devices = frozenset(cluster.devices[start : start + width])
        if devices not in known:
            known[devices] = tuple(sorted(devices, key=repr))
        kinds.append(known[devices])
    return tuple(kinds)


@lru_cache(maxsize=1024)
def different_kinds(cluster: Cluster, blocks: int) -> tuple[Kind, ...]:
    """Return the kinds of blocks that differ, in the order of the first of each."""
    return tuple(dict.fromkeys(kinds_of_blocks(cluster, blocks)))
