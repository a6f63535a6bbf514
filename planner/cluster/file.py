"""Makes the cluster that a file describes, or that `--gpus`, `--device` and `--nodes` name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from autopar.planner.cluster import toml_reading as reading
from autopar.planner.cluster.cluster import (
    Cluster,
    ClusterOrigin,
    Device,
    Link,
    LinkLevel,
    Machine,
    Racks,
    Unit,
    cluster_from,
)
from autopar.planner.cluster.sheet import (
    FABRIC_KEYS,
    LINK_KEYS,
    device_of,
    device_sheet,
    fabric_of,
    find_device,
    known_fabrics,
    known_links,
    link_of,
    local_devices,
    tables,
    with_host_memory,
)
from autopar.planner.cluster.toml_reading import TOP, parsed, placed
from autopar.planner.errors import InputError
from autopar.planner.files import MOST_DEVICES, read_given

SECTIONS = ("nodes", "network", "racks", "devices", "links")
NODE_KEYS = ("count", "device", "devices", "bridged", "link", "host_memory")
NETWORK_KEYS = ("like", "cards_per_node", *FABRIC_KEYS)
RACK_KEYS = ("nodes_per_rack", "cards_per_node", *FABRIC_KEYS)


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes."""
    source = read_given(path, what="the cluster file")
    return parse_cluster(source, where=str(path))


def parse_cluster(source: str, *, where: str) -> Cluster:
    """Return the cluster that a text describes; `where` names it in messages."""
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
    return cluster_from(nodes, network=network, racks=racks, origin=ClusterOrigin.FILE)


def _sections(table: Mapping[str, object], name: str) -> Mapping[str, Mapping[str, object]]:
    sections = reading.subtable(table.get(name, {}), where=name)
    return {key: reading.subtable(value, where=f"{name}.{key}") for key, value in sections.items()}


def _own_link(name: str, table: Mapping[str, object]) -> Link:
    where = f"links.{name}"
    reading.refuse_unknown(table, ("like", *LINK_KEYS), where=where)
    return link_of(name, _based(table, tables("links.toml", "link"), where=where), where=where)


def _own_device(name: str, table: Mapping[str, object], links: Mapping[str, Link]) -> Device:
    where = f"devices.{name}"
    if "like" not in table:
        return device_of(name, table, where=where, links=links)
    base = tables("devices.toml", "device")[
        find_device(reading.text(table, "like", where=where)).name
    ]
    inherited = {key: value for key, value in base.items() if key not in ("aliases", "source")}
    own = {key: value for key, value in table.items() if key != "like"}
    return device_of(name, {**inherited, **own}, where=where, links=links)


def _based(
    table: Mapping[str, object], known: Mapping[str, Mapping[str, object]], *, where: str
) -> Mapping[str, object]:
    """Return a table; keys that it lacks come from the known table that `like` names."""
    if "like" not in table:
        return table
    base = reading.choice(table, "like", known, where=where)
    return {**base, **{key: value for key, value in table.items() if key != "like"}}


def _nodes(
    value: object, devices: Mapping[str, Device], links: Mapping[str, Link]
) -> list[Machine]:
    if not isinstance(value, list) or not value:
        raise InputError(
            "no nodes are described",
            fix="add a section [[nodes]], in double brackets, for each kind of node",
        )
    nodes: list[Machine] = []
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
) -> Machine:
    name = reading.text(table, "device", where=where)
    device = devices[name] if name in devices else _known_device(name, devices, where=where)
    count = reading.count(table, "devices", where=where, default=device.devices_per_node)
    if "host_memory" in table:
        machine_bytes = reading.figure(table, "host_memory", reading.parse_bytes, where=where)
        device = with_host_memory(device, machine_bytes, count)
    is_bridged = reading.flag(table, "bridged", where=where)
    if is_bridged and device.bridge is None:
        raise InputError(
            f"a bridge between pairs of {device.name} is not known", where=f"{where}.bridged"
        )
    node = default_node(device, count, is_bridged=is_bridged)
    if "link" not in table:
        return node
    link = reading.choice(table, "link", {**known_links(), **links}, where=where)
    return replace(node, link=link, socket_link=None)


def _known_device(name: str, own: Mapping[str, Device], *, where: str) -> Device:
    try:
        return find_device(name)
    except InputError as error:
        own_names = f"; in this file: {', '.join(own)}" if own else ""
        raise InputError(
            error.found, where=f"{where}.device", expected=error.expected + own_names, fix=error.fix
        ) from None


def _network(value: object, nodes: list[Machine]) -> Link:
    table = reading.subtable(value, where="network")
    reading.refuse_unknown(table, NETWORK_KEYS, where="network")
    return _fabric("network", _based(table, tables("links.toml", "fabric"), where="network"), nodes)


def _racks(value: object, nodes: list[Machine]) -> Racks:
    table = reading.subtable(value, where="racks")
    reading.refuse_unknown(table, RACK_KEYS, where="racks")
    per_rack = reading.count(table, "nodes_per_rack", where="racks")
    rest = {key: one for key, one in table.items() if key != "nodes_per_rack"}
    return Racks(nodes=per_rack, link=_fabric("racks", rest, nodes))


def _fabric(where: str, table: Mapping[str, object], nodes: list[Machine]) -> Link:
    """Return a network, with its cards per node converted to cards per device."""
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


DEFAULT_DEVICE = "h100-sxm"


def choose_cluster(gpus: int, device: str | None = None, nodes: int | None = None) -> Cluster:
    """Return the cluster of `gpus` devices; its `origin` says how the device was chosen."""
    check_count(gpus, "--gpus")
    chosen, origin = device_for(device)
    per_node = _devices_per_node(gpus, nodes, chosen)
    node = default_node(chosen, per_node)
    count = gpus // per_node
    return cluster_from([node] * count, network=known_fabrics()[chosen.fabric], origin=origin)


def filling_counts(device: str | None, nodes: int | None) -> Callable[[int], bool]:
    """Return a function that tells whether a number of devices fills equal nodes.

    These are `nodes` nodes, or nodes of the usual size; a part of one usual node is accepted, too.
    """
    usual = device_for(device)[0].devices_per_node

    def is_filling(count: int) -> bool:
        return count % (nodes or usual) == 0 or (nodes is None and count < usual)

    return is_filling


def default_node(device: Device, devices: int, *, is_bridged: bool = False) -> Machine:
    """Return a node in the vendor's usual configuration."""
    return Machine(
        device=device,
        devices=devices,
        link=device.link,
        bridge=device.bridge if is_bridged else None,
        socket_link=known_links()["socket"] if device.devices_per_socket else None,
    )


def check_count(count: int, where: str) -> None:
    """Raise for a number of devices or nodes that no cluster can have."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_DEVICES:
        raise InputError(
            f"{count} is not a number of {'machines' if where == '--nodes' else 'devices'}",
            where=where,
            expected=f"a whole number from 1 to {MOST_DEVICES}",
        )


def device_for(name: str | None) -> tuple[Device, ClusterOrigin]:
    """Return the named device, else this machine's GPUs or the default; and how it was chosen."""
    if name is not None:
        return find_device(name), ClusterOrigin.NAMED
    found = local_devices()
    if found:
        return found[0], ClusterOrigin.DETECTED
    return device_sheet()[DEFAULT_DEVICE], ClusterOrigin.DEFAULT


def _devices_per_node(gpus: int, nodes: int | None, device: Device) -> int:
    if nodes is None:
        usual = device.devices_per_node
        if gpus <= usual:
            return gpus
        if gpus % usual:
            raise InputError(
                f"{gpus} devices do not fill nodes of {usual}, the usual size for {device.name}",
                fix=f"use a multiple of {usual}, or say how many nodes there are",
            )
        return usual
    check_count(nodes, "--nodes")
    if gpus % nodes:
        raise InputError(
            f"{gpus} devices do not divide into {nodes} nodes",
            fix=f"use a multiple of {nodes}, or describe unequal nodes in a cluster file",
        )
    return gpus // nodes


_MOST_SHOWN = 8


def prefix_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Return the possible numbers of first devices: a part of the first node, or whole nodes."""
    whole = tuple(accumulate(node.devices for node in cluster.nodes))
    return (*range(1, whole[0]), *whole)


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster of the first devices, with the links between them."""
    if count == cluster.size:
        return cluster
    sizes = prefix_sizes(cluster)
    if count not in sizes:
        raise InputError(
            f"{count} of the {cluster.size} devices do not make whole nodes",
            expected=_numbers_text(sizes),
            fix="take the first nodes as a whole, or a part of the first one",
        )
    first = cluster.nodes[0]
    if count <= first.devices:
        part = replace(first, devices=count)
        return cluster_from([part], network=None, origin=cluster.origin)
    nodes = cluster.nodes[: sizes.index(count) - first.devices + 2]
    return Cluster(nodes=nodes, levels=_levels(cluster, count), origin=cluster.origin)


def _levels(cluster: Cluster, count: int) -> tuple[LinkLevel, ...]:
    """Return the levels of the first devices, up to the one that joins all of them."""
    levels: list[LinkLevel] = []
    for level in cluster.levels:
        levels.append(LinkLevel(name=level.name, units=tuple(_units(level, count))))
        if len(levels[-1].units) == 1:
            break
    return tuple(levels)


def _units(level: LinkLevel, count: int) -> Iterator[Unit]:
    start = 0
    for unit in level.units:
        if start < count:
            yield replace(unit, ranks=min(unit.ranks, count - start))
        start += unit.ranks


def _numbers_text(sizes: tuple[int, ...]) -> str:
    more = f", … {sizes[-1]}" if len(sizes) > _MOST_SHOWN else ""
    return ", ".join(map(str, sizes[:_MOST_SHOWN])) + more
