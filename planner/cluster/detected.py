"""Turns what tools say about machines into a cluster file, and says what was assumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.planner.cluster.cluster import Device, Link, Topology
from autopar.planner.cluster.sheet import device_like, find_device, known_fabrics, known_links
from autopar.planner.cluster.toml_reading import bandwidth_text, bytes_text, seconds_text
from autopar.planner.cluster.tool_output import FoundNode, GpuWiring, NetworkCard, printable, shown
from autopar.planner.errors import InputError, gathered

Value = str | int | float | bool
Table = dict[str, Value]  # keys of a section of a cluster file; never changed

BEGINNING = "# Written by autopar cluster detect"
_NEAR = 0.01  # a smaller relative difference from the data sheet is ignored
# Bytes per second of one NVLink in one direction, by architecture. GPUs of other architectures have
# the data sheet's link.
_NVLINK = {"volta": 25e9, "ampere": 25e9, "hopper": 25e9, "blackwell": 50e9}
_MEASURED, _NVLINKS = "measured", "nvlinks"  # names of links in the file
_CPU_NETWORK = "ethernet-10"  # usual between machines without GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The rate and latency that messages between two processes reach."""

    bytes_per_second: float
    alpha_seconds: float

    @property
    def table(self) -> Table:
        """The keys of a link or a network that has these figures."""
        bandwidth = bandwidth_text(self.bytes_per_second)
        return {
            "bandwidth": bandwidth,
            "latency": seconds_text(self.alpha_seconds),
            "efficiency": 1.0,
        }

    def __str__(self) -> str:
        return f"{bandwidth_text(self.bytes_per_second)}, {seconds_text(self.alpha_seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The slowest link between two processes of one machine, and of different machines."""

    inside: MeasuredLink | None = None
    between: MeasuredLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedNodes:
    """Equal nodes; `own` and `link` are keys of the device and of its link in the cluster file.

    Both are empty for a device as in the data sheet. If `link` has keys, the name of the link in
    the file begins with own["link"].
    """

    count: int
    device: str
    devices: int
    bridged: bool = False
    own: Table = field(default_factory=dict)
    link: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedCluster:
    """The sections of a cluster file, and sentences about where these come from."""

    nodes: tuple[DetectedNodes, ...]
    network: Table
    found: tuple[str, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]


def detected(
    nodes: Sequence[FoundNode],
    *,
    source: str,
    named: Mapping[str, str],
    measured: MeasuredLinks | None = None,
    left_out: Sequence[str] = (),
) -> DetectedCluster:
    """Return the cluster of the nodes that a tool (`source`) lists.

    `named` maps the source's word for a device to the device that the user named; the word is ""
    for nodes whose device the source does not name.
    """
    devices = _devices(nodes, named, source)
    links = measured or MeasuredLinks()
    kinds: list[DetectedNodes] = []
    for node, device in zip(nodes, devices, strict=True):
        own = _described(node, device, links.inside)
        known = [replace(one, count=1) for one in kinds]
        if own in known:
            kinds[known.index(own)] = replace(own, count=kinds[known.index(own)].count + 1)
        else:
            kinds.append(own)
    network, told, is_assumed = _network(nodes, devices, links.between)
    names = (told,) if told else ()
    return DetectedCluster(
        nodes=tuple(kinds),
        network=network,
        found=(*_found(nodes, source, links), *(() if is_assumed else names)),
        assumed=(*_assumed(nodes, devices, links), *(names if is_assumed else ())),
        left_out=tuple(left_out),
    )


# ---- devices


def _devices(
    nodes: Sequence[FoundNode], named: Mapping[str, str], source: str
) -> tuple[Device, ...]:
    """Return the device of each node; raise one error for all kinds that are not known."""
    given = {kind.casefold(): find_device(name) for kind, name in named.items()}
    known: dict[FoundNode, Device | None] = {}
    for node in nodes:
        if (like := _like(node)) not in known:
            known[like] = given.get(node.kind.casefold()) or _device(node)
    unknown = [one for one, device in known.items() if device is None]
    if unknown:
        faults = [
            f"{shown(one.kind)!r} is no device that autopar knows"
            if one.kind
            else f"the kind of GPU of {one.name} is not told"
            for one in unknown
        ]
        kind = f"{shown(unknown[0].kind)}=" if unknown[0].kind else ""
        raise gathered(faults, where=source, fix=f"say which it is like: --device {kind}h100-sxm")
    return tuple(device for node in nodes if (device := known[_like(node)]) is not None)


def _like(node: FoundNode) -> FoundNode:
    """Return a node with only the fields that decide which device it has."""
    name = "" if node.kind else node.name
    return FoundNode(
        name=name, kind=node.kind, devices=1, memory_bytes=node.memory_bytes, hints=node.hints
    )


def _device(node: FoundNode) -> Device | None:
    if node.kind:
        return device_like(node.kind, node.memory_bytes)
    for hint in node.hints:
        try:
            return find_device(hint)
        except InputError:
            continue
    return None


def _described(node: FoundNode, device: Device, inside: MeasuredLink | None) -> DetectedNodes:
    """Return one node, with what differs from the data sheet."""
    plain = DetectedNodes(count=1, device=device.name, devices=node.devices)
    memory = node.memory_bytes
    if memory and abs(memory / device.memory_bytes - 1) > _NEAR:
        plain = replace(plain, own={"memory": bytes_text(memory)})
    if node.wiring is not None and node.devices > 1:
        plain = _wired(plain, device, node.wiring, node.pcie_generation)
    topology = plain.link.get("topology", device.link.topology)
    if inside is None or node.devices == 1 or topology == Topology.MESH:
        return plain  # in a mesh, two devices measure only their part of the links
    base = str(plain.own.get("link", device.link.name))
    like = plain.link or {"like": base}
    return replace(plain, own={**plain.own, "link": _MEASURED}, link={**like, **inside.table})


def _wired(
    node: DetectedNodes, device: Device, wiring: GpuWiring, generation: int | None
) -> DetectedNodes:
    """Return a node with the links between its GPUs, where these are not the data sheet's."""
    peers = [sum(map(bool, row)) for row in wiring.links]
    if device.bridge is not None and set(peers) == {1}:
        return _with_pcie(replace(node, bridged=True), device, wiring, generation)
    if not min(peers):
        return _with_pcie(node, device, wiring, generation)
    link = _nvlinks(device, wiring)
    if link is None:
        return node
    return replace(node, own={**node.own, "link": _NVLINKS}, link=link)


def _nvlinks(device: Device, wiring: GpuWiring) -> Table | None:
    """Return the NVLinks of a machine as a link, or None if they are those of the data sheet.

    If a GPU's NVLinks to all others add up to more than the data sheet's rate, the same links are
    counted for each other GPU: a switch joins them.
    """
    rate = _NVLINK.get(device.architecture.casefold())
    if rate is None:
        return None
    sheet = device.link.bytes_per_second
    total = min(map(sum, wiring.links)) * rate
    least = min(count for row in wiring.links for count in row if count) * rate
    is_switched = len(wiring.links) == 2 or total > (1 + _NEAR) * max(sheet, least)
    topology = Topology.SWITCH if is_switched else Topology.MESH
    bandwidth = least if is_switched else total
    if topology is device.link.topology and abs(bandwidth / sheet - 1) < _NEAR:
        return None
    name = device.link.name if _is_nvlink(device.link) else "nvlink3"
    return {"like": name, "topology": str(topology), "bandwidth": bandwidth_text(bandwidth)}


def _is_nvlink(link: Link) -> bool:
    return link.name.startswith("nvlink")


def _with_pcie(
    node: DetectedNodes, device: Device, wiring: GpuWiring, generation: int | None
) -> DetectedNodes:
    """Return a node whose GPUs are joined by PCIe of this generation, with its GPUs per CPU."""
    own = dict(node.own)
    name = f"pcie{generation}" if f"pcie{generation}" in known_links() else ""
    if (name or _is_nvlink(device.link)) and name != device.link.name:
        own["link"] = name or "pcie4"
    sizes, count = set(Counter(wiring.parts).values()), len(wiring.parts)
    (per_socket, *more) = sizes
    is_told = not more and (per_socket > 1 or count == 2)  # else a VM hides the CPUs
    if is_told and per_socket < count and per_socket != device.devices_per_socket:
        own["devices_per_socket"] = per_socket
    if is_told and per_socket == count > (device.devices_per_socket or count):
        own["devices_per_socket"] = count
    return replace(node, own=own)


# ---- the network


def _network(
    nodes: Sequence[FoundNode], devices: Sequence[Device], measured: MeasuredLink | None
) -> tuple[Table, str, bool]:
    """Return the network between nodes, a sentence about it, and whether it is assumed."""
    if len(nodes) == 1:
        return {}, "", False
    table, told, is_assumed = _unmeasured(nodes, devices)
    if measured is None:
        return table, told, is_assumed
    cards = f", {told}" if not is_assumed else ""
    figures = {key: value for key, value in table.items() if key != "bandwidth"}
    return {**figures, **measured.table}, f"measured between machines: {measured}{cards}", False


def _unmeasured(nodes: Sequence[FoundNode], devices: Sequence[Device]) -> tuple[Table, str, bool]:
    machine, device = next(
        ((one, device) for one, device in zip(nodes, devices, strict=True) if _cards_of(one)),
        (None, devices[0]),
    )
    if machine is not None:
        return _network_of_cards(_cards_of(machine), device, machine.devices)
    rented = {one.network for one in nodes}
    if len(rented) == 1 and (name := rented.pop()):
        return {"like": name}, f"the network of rented machines of this type: {name}", False
    slowest = min(
        (known_fabrics()[_CPU_NETWORK if one.is_cpu else one.fabric] for one in devices),
        key=lambda one: one.bytes_per_second * one.ports_per_device,
    )
    return (
        {"like": slowest.name},
        f"the network is {slowest.name}, as such nodes usually have",
        True,
    )


def _cards_of(node: FoundNode) -> Sequence[NetworkCard]:
    """Return the fastest cards of a machine; only those beside its GPUs, if there are any."""
    beside = node.wiring.cards if node.wiring else ()
    cards = [one for one in node.cards if one.name in beside] or node.cards
    most = max((one.bytes_per_second for one in cards), default=0.0)
    return [one for one in cards if one.bytes_per_second == most]


def _network_of_cards(
    cards: Sequence[NetworkCard], device: Device, devices: int
) -> tuple[Table, str, bool]:
    rate = cards[0].bytes_per_second
    fabric = _fabric_of(cards[0], device)
    table: Table = {"like": fabric.name, "cards_per_device": round(len(cards) / devices, 4)}
    if abs(fabric.bytes_per_second / rate - 1) > _NEAR:
        table["bandwidth"] = f"{rate * 8 / 1e9:g} Gb/s"
    count = "1 card" if len(cards) == 1 else f"{len(cards)} cards"
    told = f"{count} of {rate * 8 / 1e9:g} Gb/s in a node, {shown(cards[0].layer)}"
    return table, f"{told}: {fabric.name}", False


def _fabric_of(card: NetworkCard, device: Device) -> Link:
    """Return the known network that a card is nearest to."""
    fabrics = known_fabrics()
    if card.layer == "InfiniBand":
        own = [one for one in fabrics.values() if one.name.startswith("infiniband")]
        return min(own, key=lambda one: abs(one.bytes_per_second - card.bytes_per_second))
    if card.layer == "Ethernet":
        return fabrics["roce-400"]
    if card.layer == "TCP":
        return fabrics[_CPU_NETWORK if device.is_cpu else "ethernet-100"]
    return fabrics["efa1" if device.architecture.casefold() == "ampere" else "efa2"]


# ---- sentences


def _found(nodes: Sequence[FoundNode], source: str, measured: MeasuredLinks) -> Iterator[str]:
    kinds = Counter((one.devices, one.kind) for one in nodes)
    for (devices, kind), count in kinds.items():
        names = [one.name for one in nodes if (one.devices, one.kind) == (devices, kind)]
        more = f" and {count - 3:,} more" if count > 3 else ""
        machines = "1 node" if count == 1 else f"{count:,} nodes"
        what = f"{devices} × {shown(kind)}" if kind else f"{devices} GPUs"
        yield f"{source}: {machines} of {what}: {', '.join(names[:3])}{more}"
    if measured.inside is not None:
        yield f"measured inside a machine: {measured.inside}"


def _assumed(
    nodes: Sequence[FoundNode], devices: Sequence[Device], measured: MeasuredLinks
) -> Iterator[str]:
    pairs = list(zip(nodes, devices, strict=True))
    for kind, memory, device in dict.fromkeys((n.kind, n.memory_bytes, d) for n, d in pairs):
        if memory is None and not device.is_cpu:
            size = bytes_text(device.memory_bytes)
            what = f"{shown(kind)} is" if kind else "the GPUs are"
            yield f"{what} {device.name}, with {size}: no tool tells the memory"
    if measured.inside is None:
        looked_at = {(d.name, n.devices) for n, d in pairs if n.wiring}
        rest = {d for n, d in pairs if n.devices > 1 and (d.name, n.devices) not in looked_at}
        for device in sorted(rest, key=lambda one: one.name):
            yield f"links inside nodes of {device.name} are {device.link.name}, as usual"
    for node in nodes:
        linked = [any(row) for row in node.wiring.links] if node.wiring else []
        if any(linked) and not all(linked):
            yield f"NVLinks between some GPUs of {node.name} are left out: all have PCIe"


# ---- the file


def cluster_text(found: DetectedCluster) -> str:
    """Return a cluster file; sentences become comments."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: DetectedCluster) -> Iterator[str]:
    yield f"{BEGINNING}; docs/cluster-file.md explains the keys."
    for word, sentences in (
        ("found", found.found),
        ("assumed", found.assumed),
        ("left out", found.left_out),
    ):
        yield from (f"# {word}: {printable(one)}" for one in sentences)
    names = [_name_in_file(one, found.nodes) for one in found.nodes]
    for node, name in zip(found.nodes, names, strict=True):
        bridged: Table = {"bridged": True} if node.bridged else {}
        table = {"count": node.count, "device": name, "devices": node.devices, **bridged}
        yield from _section("[[nodes]]", table)
    if found.network:
        yield from _section("[network]", found.network)
    for name, node in dict(zip(names, found.nodes, strict=True)).items():
        if node.own:
            link = {"link": f"{node.own['link']}-{name}"} if node.link else {}
            yield from _section(f"[devices.{name}]", {"like": node.device, **node.own, **link})
        if node.link:
            yield from _section(f"[links.{node.own['link']}-{name}]", node.link)


def _name_in_file(node: DetectedNodes, nodes: Sequence[DetectedNodes]) -> str:
    """Return the name of a node's device: the known one, with a number if it has variants."""
    variants: list[tuple[Table, Table]] = []
    for one in nodes:
        if one.device == node.device and (one.own, one.link) not in variants:
            variants.append((one.own, one.link))
    place = variants.index((node.own, node.link))
    return node.device if len(variants) == 1 or not node.own else f"{node.device}-{place + 1}"


def _section(head: str, table: Table) -> Iterator[str]:
    yield f"\n{head}"
    for key, value in table.items():
        yield f"{key} = {json.dumps(value)}"
