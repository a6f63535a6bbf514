"""The machines of a plan: devices, links, nodes in rank order, and levels of links."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from autopar.planner.errors import InputError
from autopar.planner.files import (
    MOST_DEVICES,
    Bytes,
    Degree,
    FigureNumber,
    Rate,
    Seconds,
    Share,
    SomeBytes,
)
from autopar.planner.precision import RowEnum


class Topology(RowEnum):
    """How the units of one level are wired together."""

    ring_directions: int  # in which a unit sends to a neighbour; 0: it reaches every other unit
    has_trees: bool  # messages may take a tree of units
    has_own_links: bool  # to each other unit; the rate is their sum

    # name, ring directions, has trees, has own links
    RING = "ring", 1, False, False
    DOUBLE_RING = "double-ring", 2, False, False  # both directions at once
    TREE = "tree", 0, True, False  # units under switches that pass messages on
    MESH = "mesh", 0, True, True
    SWITCH = "switch", 0, True, False  # every unit reaches every other at its full rate


class Backend(StrEnum):
    """The library that runs the collectives; NCCL also stands for RCCL, which works alike."""

    NCCL = "nccl"
    GLOO = "gloo"

    @property
    def is_on_cpu(self) -> bool:
        """Whether its ranks compute on CPUs."""
        return self is Backend.GLOO


class Collective(StrEnum):
    """A collective of a group of ranks; see costs/collectives for the meaning of its payload."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point-to-point"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """Measured times of a collective over a link (`autopar profile`), and a line fitted to them."""

    collective: Collective
    ranks: Degree
    alpha_seconds: Seconds  # of one hop
    bytes_per_second: Rate
    points: tuple[tuple[Bytes, Seconds], ...]  # payload bytes and seconds; both increase


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between devices, sockets or nodes; at 0.5 ports per device, two devices share one."""

    name: str
    topology: Topology
    bytes_per_second: Rate  # of one port in one direction, from the data sheet
    alpha_seconds: Seconds  # of one hop of the smallest message
    efficiency: Share  # fraction of the rate that long transfers reach
    ports_per_device: FigureNumber = 1.0
    reduction_efficiency: Share = 0.0  # fraction reached when the switch itself sums; 0: it cannot
    backend: Backend = Backend.NCCL
    collectives: tuple[MeasuredCollective, ...] = ()  # measured times, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """A device's share of the host's memory, and the link to it; rates are those of data sheets."""

    memory_bytes: SomeBytes
    memory_bytes_per_second: Rate
    bytes_per_second: Rate  # of the link, in one direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The data sheet of one device; peaks are without sparsity."""

    name: str
    vendor: str
    architecture: str
    memory_bytes: SomeBytes
    memory_bytes_per_second: Rate
    peaks: tuple[tuple[str, Rate], ...]  # dtype, FLOPs per second
    link: Link  # to the other devices of its scale-up domain
    domain: Degree  # devices in a scale-up domain; may span several nodes
    devices_per_node: Degree
    launch_seconds: Seconds
    fabric: str  # the usual network between nodes
    host: HostShare
    bridge: Link | None = None  # between pairs, if the cluster file has it
    devices_per_socket: Degree | None = None  # if traffic between sockets is slower
    power_watts: Rate | None = None
    multiprocessors: Degree | None = None
    cache_bytes: SomeBytes | None = None
    usd_per_hour: FigureNumber | None = None
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the host's CPU."""
        return self.architecture.casefold() == "cpu"

    @property
    def torch_name(self) -> str:
        """The kind of device as torch calls it."""
        return "cpu" if self.is_cpu else "cuda"

    def peak_flops_per_second(self, dtype: str) -> float:
        """Return the dense peak at a dtype."""
        peaks = dict(self.peaks)
        if dtype not in peaks:
            raise InputError(
                f"{self.name} has no {dtype} units",
                expected=f"one of {', '.join(peaks)}",
                fix="plan in one of these (--precision), or give the peak in a cluster file",
            )
        return peaks[dtype]


class ClusterOrigin(StrEnum):
    """How the devices were chosen; commands print it."""

    NAMED = "named"  # with --device
    DETECTED = "detected"  # the devices of this machine
    DEFAULT = "default"  # autopar's default device
    FILE = "file"  # in a cluster file


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine: its devices, all of one kind, and the links between them."""

    device: Device
    devices: Degree
    link: Link
    bridge: Link | None = None  # between pairs of neighbours
    socket_link: Link | None = None  # between sockets, with device.devices_per_socket each


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Consecutive ranks joined by one link."""

    ranks: Degree
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """A level of the hierarchy: all ranks, divided into units; a link joins the ranks of a unit."""

    name: str  # "pair", "socket", "node", "network" or "rack"
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in rank order, and levels of links, from neighbours up to all devices.

    Has no slots, so that slow properties, such as the hash, can be cached.
    """

    nodes: tuple[Machine, ...]
    levels: tuple[LinkLevel, ...]
    origin: ClusterOrigin = ClusterOrigin.FILE

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
        """Return after how many ranks the machines and links repeat.

        If a level has unequal units, it is the number of all ranks.
        """
        repeated = [level for level in self.levels if len(level.units) > 1]
        if any(len(set(level.units)) > 1 for level in repeated):
            return self.size
        return math.lcm(*(level.units[0].ranks for level in repeated))

    @property
    def has_equal_nodes(self) -> bool:
        """Whether all nodes are equal."""
        return all(node == self.nodes[0] for node in self.nodes)

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of all devices, or None if one has no price."""
        prices = [node.device.usd_per_hour for node in self.nodes]
        if any(price is None for price in prices):
            return None
        return sum(
            node.devices * (price or 0.0) for node, price in zip(self.nodes, prices, strict=True)
        )


def content_hash(cluster: Cluster) -> str:
    """Return a hash of 64 hexadecimal digits that depends only on content.

    Prices, sources, origin and names of links are left out, because they change no prediction.
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
        if not value.get("collectives"):  # so that an unmeasured link keeps its hash
            left_out |= {"collectives"}
        return {key: _without_remarks(one) for key, one in value.items() if key not in left_out}
    if isinstance(value, (list, tuple)):
        return [_without_remarks(one) for one in value]
    return value


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks:
    """How many nodes are in a rack, and the links between racks."""

    nodes: int  # per rack; a scale-up domain of several nodes counts once
    link: Link


def cluster_from(
    nodes: Sequence[Machine],
    *,
    network: Link | None,
    racks: Racks | None = None,
    origin: ClusterOrigin,
) -> Cluster:
    """Return the cluster of these nodes; raises if no network joins them.

    The library that runs the collectives of the nodes' links also runs those of the network.
    """
    if not nodes:
        raise InputError("the cluster has no nodes", fix="add a section [[nodes]]")
    network = network and replace(network, backend=nodes[0].link.backend)
    size = sum(node.devices for node in nodes)
    if size > MOST_DEVICES:
        raise InputError(
            f"{size} devices", expected=f"at most {MOST_DEVICES}", fix="check the number"
        )
    domains = _domains(nodes)
    if len(domains) > 1 and network is None:
        raise InputError(
            f"{len(nodes)} nodes, but no network between them",
            fix='add a section [network], for example with like = "infiniband-ndr"',
        )
    inner = [
        *_inner_levels(
            "pair", nodes, lambda node: 2 if node.bridge else node.devices, lambda node: node.bridge
        ),
        *_inner_levels("socket", nodes, _socket_ranks, lambda node: node.link),
    ]
    node_level = LinkLevel(name="node", units=tuple(_domain_unit(domain) for domain in domains))
    outer = (
        _network_levels(domains, network, racks) if network is not None and len(domains) > 1 else []
    )
    return Cluster(nodes=tuple(nodes), levels=(*inner, node_level, *outer), origin=origin)


def _domains(nodes: Sequence[Machine]) -> list[tuple[Machine, ...]]:
    """Return the scale-up domains: single nodes, or neighbours joined by a switch (NVL72)."""
    domains: list[tuple[Machine, ...]] = []
    for node in nodes:
        device = node.device
        spans_nodes = device.domain > device.devices_per_node
        last = domains[-1] if domains else ()
        fits = (len(last) + 1) * node.devices <= device.domain
        if spans_nodes and fits and last and last[0] == node:
            domains[-1] = (*last, node)
        else:
            domains.append((node,))
    return domains


def _domain_unit(domain: Sequence[Machine]) -> Unit:
    node = domain[0]
    link = node.link
    if node.bridge and node.devices <= 2:
        link = node.bridge
    if node.socket_link and _socket_ranks(node) < node.devices:
        link = node.socket_link
    return Unit(ranks=sum(one.devices for one in domain), link=link)


def _socket_ranks(node: Machine) -> int:
    per_socket = node.device.devices_per_socket
    return min(per_socket, node.devices) if node.socket_link and per_socket else node.devices


def _inner_levels(
    name: str,
    nodes: Sequence[Machine],
    ranks: Callable[[Machine], int],
    link: Callable[[Machine], Link | None],
) -> list[LinkLevel]:
    """Return the level whose units are parts of nodes; empty if every node is one unit."""
    if all(ranks(node) >= node.devices for node in nodes):
        return []
    units = [
        Unit(ranks=len(part), link=link(node) or node.link)
        for node in nodes
        for part in _parts(range(node.devices), ranks(node))
    ]
    return [LinkLevel(name=name, units=tuple(units))]


def _network_levels(
    domains: Sequence[tuple[Machine, ...]], network: Link, racks: Racks | None
) -> list[LinkLevel]:
    total = sum(node.devices for domain in domains for node in domain)
    everything = LinkLevel(name="network", units=(Unit(ranks=total, link=network),))
    if racks is None or racks.nodes >= len(domains):
        return [everything]
    in_racks = tuple(
        Unit(ranks=sum(node.devices for domain in rack for node in domain), link=network)
        for rack in _parts(domains, racks.nodes)
    )
    between = LinkLevel(name="rack", units=(Unit(ranks=total, link=racks.link),))
    return [LinkLevel(name="network", units=in_racks), between]


def _parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return consecutive parts of this size; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
