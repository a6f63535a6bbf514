"""Turns a cluster file (TOML, documented in docs/cluster-file.md) into a cluster."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autopar.planner.cluster import reading
from autopar.planner.cluster.choose import usual_node
from autopar.planner.cluster.cluster import Cluster, Node, Origin
from autopar.planner.cluster.device import Device
from autopar.planner.cluster.levels import Racks, cluster_from
from autopar.planner.cluster.link import Link
from autopar.planner.cluster.places import TOP, placed
from autopar.planner.cluster.sheet import (
    FABRIC_KEYS,
    LINK_KEYS,
    device_of,
    device_tables,
    fabric_of,
    find_device,
    link_of,
    link_tables,
)
from autopar.planner.cluster.toml_text import parsed
from autopar.planner.errors import InputError
from autopar.planner.given import read_given
from autopar.planner.numbers import MOST_DEVICES

SECTIONS = ("nodes", "network", "racks", "devices", "links")
NODE_KEYS = ("count", "device", "devices", "bridged", "link")
NETWORK_KEYS = ("like", "cards_per_node", *FABRIC_KEYS)
RACK_KEYS = ("nodes_per_rack", "cards_per_node", *FABRIC_KEYS)


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes."""
    source = read_given(path, what="the cluster file")
    return parse_cluster(source, where=str(path))


def parse_cluster(source: str, *, where: str) -> Cluster:
    """Return the cluster that a text describes; `where` names the text in messages."""
    table = parsed(source, where=where)
    with placed(source, where=where):
        return _cluster(table)


def _cluster(table: Mapping[str, object]) -> Cluster:
    if {"pins", "limits", "choices", "splits", "stages", "recompute"} & table.keys():
        raise InputError("this is a constraints file", fix="give it by --constraints")
    reading.refuse_unknown(table, SECTIONS, where=TOP)
    links = {name: _own_link(name, value) for name, value in _sections(table, "links").items()}
    devices = {
        name: _own_device(name, value, links) for name, value in _sections(table, "devices").items()
    }
    nodes = _nodes(table.get("nodes"), devices, links)
    network = _network(table["network"], nodes) if "network" in table else None
    racks = _racks(table["racks"], nodes) if "racks" in table else None
    return cluster_from(nodes, network=network, racks=racks, origin=Origin.FILE)


def _sections(table: Mapping[str, object], name: str) -> Mapping[str, Mapping[str, object]]:
    sections = reading.subtable(table.get(name, {}), where=name)
    return {key: reading.subtable(value, where=f"{name}.{key}") for key, value in sections.items()}


def _own_link(name: str, table: Mapping[str, object]) -> Link:
    where = f"links.{name}"
    reading.refuse_unknown(table, ("like", *LINK_KEYS), where=where)
    return link_of(name, _based(table, link_tables("link"), where=where), where=where)


def _own_device(name: str, table: Mapping[str, object], links: Mapping[str, Link]) -> Device:
    where = f"devices.{name}"
    if "like" not in table:
        return device_of(name, table, where=where, links=links)
    base = device_tables()[find_device(reading.text(table, "like", where=where)).name]
    inherited = {key: value for key, value in base.items() if key not in ("aliases", "source")}
    own = {key: value for key, value in table.items() if key != "like"}
    return device_of(name, {**inherited, **own}, where=where, links=links)


def _based(
    table: Mapping[str, object], known: Mapping[str, Mapping[str, object]], *, where: str
) -> Mapping[str, object]:
    """Return a table completed by the lines of the known one that `like` names."""
    if "like" not in table:
        return table
    base = reading.choice(table, "like", known, where=where)
    return {**base, **{key: value for key, value in table.items() if key != "like"}}


def _nodes(value: object, devices: Mapping[str, Device], links: Mapping[str, Link]) -> list[Node]:
    if not isinstance(value, list) or not value:
        raise InputError(
            "no nodes are described",
            fix="add a section [[nodes]], in double brackets, for each kind of node",
        )
    nodes: list[Node] = []
    for number, section in enumerate(value, start=1):
        where = f"nodes {number}"
        table = reading.subtable(section, where=where)
        reading.refuse_unknown(table, NODE_KEYS, where=where)
        count = reading.count(table, "count", where=where, default=1)
        node = _node(table, devices, links, where=where)
        if count * node.devices > MOST_DEVICES:
            raise InputError(
                f"{count} × {node.devices} devices", where=where, expected=f"at most {MOST_DEVICES}"
            )
        nodes += [node] * count
    return nodes


def _node(
    table: Mapping[str, object],
    devices: Mapping[str, Device],
    links: Mapping[str, Link],
    *,
    where: str,
) -> Node:
    name = reading.text(table, "device", where=where)
    device = devices[name] if name in devices else _known_device(name, devices, where=where)
    count = reading.count(table, "devices", where=where, default=device.devices_per_node)
    is_bridged = reading.flag(table, "bridged", where=where)
    if is_bridged and device.bridge is None:
        raise InputError(
            f"a bridge between pairs of {device.name} is not known", where=f"{where}.bridged"
        )
    node = usual_node(device, count, is_bridged=is_bridged)
    if "link" not in table:
        return node
    name_of_link = reading.text(table, "link", where=where)
    known = {
        **{name: link_of(name, one, where=name) for name, one in link_tables("link").items()},
        **links,
    }
    link = reading.choice({"link": name_of_link}, "link", known, where=where)
    return replace(node, link=link, socket_link=None)


def _known_device(name: str, own: Mapping[str, Device], *, where: str) -> Device:
    try:
        return find_device(name)
    except InputError as error:
        own_names = f"; in this file: {', '.join(own)}" if own else ""
        raise InputError(
            error.found, where=f"{where}.device", expected=error.expected + own_names, fix=error.fix
        ) from None


def _network(value: object, nodes: list[Node]) -> Link:
    table = reading.subtable(value, where="network")
    reading.refuse_unknown(table, NETWORK_KEYS, where="network")
    return _fabric("network", _based(table, link_tables("fabric"), where="network"), nodes)


def _racks(value: object, nodes: list[Node]) -> Racks:
    table = reading.subtable(value, where="racks")
    reading.refuse_unknown(table, RACK_KEYS, where="racks")
    per_rack = reading.count(table, "nodes_per_rack", where="racks")
    rest = {key: one for key, one in table.items() if key != "nodes_per_rack"}
    return Racks(nodes=per_rack, link=_fabric("racks", rest, nodes))


def _fabric(where: str, table: Mapping[str, object], nodes: list[Node]) -> Link:
    """Return a network; its cards per node become cards per device."""
    if "cards_per_node" not in table:
        own = "cards_per_device" in table
        return fabric_of(where, table if own else {**table, "cards_per_device": 1.0}, where=where)
    cards = reading.count(table, "cards_per_node", where=where)
    sizes = {node.devices for node in nodes}
    if len(sizes) > 1:
        raise InputError(
            "nodes differ in size, so cards_per_node does not say how many a device has",
            where=f"{where}.cards_per_node",
            fix="write cards_per_device",
        )
    rest = {
        key: value
        for key, value in table.items()
        if key not in ("cards_per_node", "cards_per_device")
    }
    return fabric_of(where, {**rest, "cards_per_device": cards / sizes.pop()}, where=where)
