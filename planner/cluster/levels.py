"""Turns nodes and the network between them into the levels of a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.planner.cluster.cluster import Cluster, Level, Node, Origin, Unit
from autopar.planner.cluster.link import Link
from autopar.planner.errors import InputError
from autopar.planner.numbers import MOST_DEVICES

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks:
    """How nodes stand in racks, and the links between racks."""

    nodes: int  # per rack
    link: Link


def cluster_from(
    nodes: Sequence[Node], *, network: Link | None, racks: Racks | None = None, origin: Origin
) -> Cluster:
    """Return the cluster of these nodes; refuses nodes that nothing joins."""
    if not nodes:
        raise InputError("the cluster has no nodes", fix="add a section [[nodes]]")
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
    node_level = Level(name="node", units=tuple(_domain_unit(domain) for domain in domains))
    outer = (
        _network_levels(domains, network, racks) if network is not None and len(domains) > 1 else []
    )
    return Cluster(nodes=tuple(nodes), levels=(*inner, node_level, *outer), origin=origin)


def _domains(nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Return the scale-up domains: single nodes, or neighbours that one switch joins (NVL72)."""
    domains: list[tuple[Node, ...]] = []
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


def _domain_unit(domain: Sequence[Node]) -> Unit:
    node = domain[0]
    link = node.link
    if node.bridge and node.devices <= 2:
        link = node.bridge
    if node.socket_link and _socket_ranks(node) < node.devices:
        link = node.socket_link
    return Unit(ranks=sum(one.devices for one in domain), link=link)


def _socket_ranks(node: Node) -> int:
    per_socket = node.device.devices_per_socket
    return min(per_socket, node.devices) if node.socket_link and per_socket else node.devices


def _inner_levels(
    name: str,
    nodes: Sequence[Node],
    ranks: Callable[[Node], int],
    link: Callable[[Node], Link | None],
) -> list[Level]:
    """Return the level whose units are parts of nodes; none when every node is one unit."""
    if all(ranks(node) >= node.devices for node in nodes):
        return []
    units = [
        Unit(ranks=len(part), link=link(node) or node.link)
        for node in nodes
        for part in _parts(range(node.devices), ranks(node))
    ]
    return [Level(name=name, units=tuple(units))]


def _network_levels(
    domains: Sequence[tuple[Node, ...]], network: Link, racks: Racks | None
) -> list[Level]:
    total = sum(node.devices for domain in domains for node in domain)
    everything = Level(name="network", units=(Unit(ranks=total, link=network),))
    if racks is None or racks.nodes >= len(domains):
        return [everything]
    in_racks = tuple(
        Unit(ranks=sum(node.devices for domain in rack for node in domain), link=network)
        for rack in _parts(domains, racks.nodes)
    )
    between = Level(name="rack", units=(Unit(ranks=total, link=racks.link),))
    return [Level(name="network", units=in_racks), between]


def _parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return consecutive parts of this size; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
