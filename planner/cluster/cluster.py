"""The machines of one plan: nodes of devices in rank order, and the levels that join them."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property

from autopar.planner.cluster.device import Device
from autopar.planner.cluster.link import Link
from autopar.planner.numbers import Degree


class Origin(StrEnum):
    """Who chose the devices; commands say it to people."""

    NAMED = "named"  # by --device
    DETECTED = "detected"  # the devices of this machine
    DEFAULT = "default"  # nobody: the default device of autopar
    FILE = "file"  # by a cluster file


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine: its devices, all alike, and the links among them."""

    device: Device
    devices: Degree
    link: Link
    bridge: Link | None = None  # joins pairs of neighbours
    socket_link: Link | None = None  # joins the sockets, each of device.devices_per_socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Consecutive ranks that one link joins."""

    ranks: Degree
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One step of the hierarchy: all ranks, cut into the units within which its links reach."""

    name: str  # "pair", "socket", "node", "network" or "rack"
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in rank order, and the levels from the one that joins neighbours to the one for all.

    Without slots: what takes long for thousands of nodes, its hash too, is found once.
    """

    nodes: tuple[Node, ...]
    levels: tuple[Level, ...]
    origin: Origin = Origin.FILE

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.levels))

    @cached_property
    def size(self) -> int:
        """Return the number of devices."""
        return sum(node.devices for node in self.nodes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the device of each rank."""
        return tuple(node.device for node in self.nodes for _ in range(node.devices))

    @cached_property
    def period(self) -> int:
        """Return after how many ranks the machines repeat; all of them where they are unequal."""
        repeated = [level for level in self.levels if len(level.units) > 1]
        if any(len(set(level.units)) > 1 for level in repeated):
            return self.size
        return math.lcm(*(level.units[0].ranks for level in repeated))

    @property
    def has_equal_nodes(self) -> bool:
        """Say whether all nodes are alike."""
        return all(node == self.nodes[0] for node in self.nodes)

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of all devices, when each has one."""
        prices = [node.device.usd_per_hour for node in self.nodes]
        if any(price is None for price in prices):
            return None
        return sum(
            node.devices * (price or 0.0) for node, price in zip(self.nodes, prices, strict=True)
        )


def content_hash(cluster: Cluster) -> str:
    """Return 64 hexadecimal digits, the same for clusters of equal content however described.

    Prices, sources and the origin change no prediction, so they are left out, and so are the names
    of links.
    """
    content = {
        "nodes": [asdict(node) for node in cluster.nodes],
        "levels": [asdict(level) for level in cluster.levels],
    }
    text = json.dumps(_without_remarks(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


REMARKS = frozenset({"usd_per_hour", "source"})


def _without_remarks(value: object) -> object:
    if isinstance(value, dict):
        is_link = "alpha_seconds" in value
        left_out = REMARKS | ({"name"} if is_link else set())
        if not value.get("collectives"):  # a link that was not measured is what it always was
            left_out |= {"collectives"}
        return {key: _without_remarks(one) for key, one in value.items() if key not in left_out}
    if isinstance(value, (list, tuple)):
        return [_without_remarks(one) for one in value]
    return value
