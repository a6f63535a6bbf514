"""Reads what nvidia-smi, Slurm, Kubernetes and Linux say about machines and their devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field, ValidationError

from autopar.planner.errors import InputError
from autopar.planner.files import MOST_DEVICES

_MEBIBYTE = 2**20
_MOST_CHARACTERS = 60  # characters of a tool's text in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundNode:
    """A machine as a tool describes it, with devices of one kind."""

    name: str
    kind: str  # as the tool calls its devices; "" if it names none
    devices: int
    memory_bytes: int | None = None  # of a device
    hints: tuple[str, ...] = ()  # other words about the machine; one may be the device's name
    network: str = ""  # the known network that such machines have
    # what tools inside the machine say
    wiring: GpuWiring | None = None
    pcie_generation: int | None = None
    cards: tuple[NetworkCard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundNodes:
    """The machines that a tool lists, and sentences about those that are left out."""

    nodes: tuple[FoundNode, ...]
    left_out: tuple[str, ...] = ()


def printable(text: str) -> str:
    """Return a text on one line, without control characters."""
    return "".join(one if one.isprintable() else " " for one in text)


def shown(text: str) -> str:
    """Return a tool's text for a message, shortened."""
    line = printable(text)
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"


# ---- nvidia-smi

GPU_QUERY = (
    *("nvidia-smi", "--query-gpu=name,memory.total,pcie.link.gen.max,mig.mode.current"),
    "--format=csv,noheader,nounits",
)
TOPOLOGY_QUERY = ("nvidia-smi", "topo", "-m")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int
    pcie_generation: int | None


def gpus_in(text: str) -> tuple[FoundGpu, ...]:
    """Return the GPUs that `nvidia-smi --query-gpu` lists; raises if one is divided into slices."""
    return tuple(_gpu(line) for line in text.splitlines() if line.strip())


def _gpu(line: str) -> FoundGpu:
    parts = [one.strip() for one in line.split(",")]
    if len(parts) != 4 or not re.fullmatch(r"\d{1,9}", parts[1], re.ASCII):
        raise InputError(
            f"nvidia-smi answers {shown(line)!r}",
            expected="name, memory in MiB, PCIe generation and MIG mode of a GPU",
        )
    if parts[3] == "Enabled":
        raise InputError(
            f"a {shown(parts[0])} here is divided into slices (MIG)",
            fix="plan for whole GPUs: nvidia-smi -mig 0, or describe the cluster in a file",
        )
    generation = int(parts[2]) if re.fullmatch(r"\d", parts[2], re.ASCII) else None
    memory = int(parts[1]) * _MEBIBYTE
    return FoundGpu(name=parts[0], memory_bytes=memory, pcie_generation=generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWiring:
    """How the GPUs of a machine are joined.

    `links[i][j]` is the number of NVLinks from GPU i to GPU j. GPUs of one part reach each other
    without crossing from one CPU to another. `cards` are the network cards that a GPU reaches over
    PCIe switches alone.
    """

    links: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]  # the part of each GPU
    cards: tuple[str, ...]


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"X|NV(?P<links>\d{1,3})|SYS|SOC|NODE|PHB|PXB|PIX", re.ASCII)
_BETWEEN_CPUS = ("SYS", "SOC")
_BESIDE = ("PIX", "PXB")  # between a GPU and a card there are only PCIe switches


def wiring_in(text: str) -> GpuWiring:
    """Return the wiring that `nvidia-smi topo -m` shows as a table."""
    lines = [_COLOURS.sub("", line) for line in text.splitlines()]
    heads = (line.partition("CPU Affinity")[0].split() for line in lines)
    columns = next((one for one in heads if one[:1] == ["GPU0"] and "X" not in one), [])
    rows = {words[0]: words[1:] for words in map(str.split, lines) if words}
    gpus = [place for place, name in enumerate(columns) if re.fullmatch(r"GPU\d+", name)]
    if not gpus:
        raise InputError("nvidia-smi topo -m shows no table of GPUs")
    table = [_cells(columns, rows.get(columns[gpu], [])) for gpu in gpus]
    others = [place for place in range(len(columns)) if place not in gpus]
    beside = [place for place in others if any(row[place] in _BESIDE for row in table)]
    names = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", "\n".join(lines), re.MULTILINE))
    cards = {place: names.get(columns[place], columns[place]) for place in others}
    return GpuWiring(
        links=tuple(tuple(_nvlinks(row[gpu]) for gpu in gpus) for row in table),
        parts=_parts([[row[gpu] not in _BETWEEN_CPUS for gpu in gpus] for row in table]),
        cards=tuple(cards[place] for place in beside),
    )


def _cells(columns: Sequence[str], words: Sequence[str]) -> Sequence[str]:
    cells = words[: len(columns)]
    wrong = [one for one in cells if not _CELL.fullmatch(one)]
    if wrong or len(cells) < len(columns):
        found = shown(wrong[0]) if wrong else "too few words in a row"
        raise InputError(f"the table of nvidia-smi topo -m cannot be read: {found}")
    return cells


def _nvlinks(cell: str) -> int:
    found = _CELL.fullmatch(cell)
    return int(found["links"] or 0) if found else 0


def _parts(joined: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Return a number for each GPU, equal for GPUs that are joined directly or through others."""
    first = list(range(len(joined)))
    for one in range(len(joined)):
        for other in range(one):
            if joined[one][other]:
                low, high = sorted((first[one], first[other]))
                first = [low if part == high else part for part in first]
    return tuple(first)


# ---- network cards


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCard:
    """A network card: its rate in one direction, and its protocol."""

    name: str
    bytes_per_second: float
    layer: str  # "InfiniBand", "Ethernet", or a cloud's own protocol


_RATE = re.compile(r"\s*(\d{1,5}(?:\.\d{1,3})?) Gb/sec\b.*\s*", re.ASCII)


def cards_in(texts: Mapping[str, tuple[str, str, str]]) -> tuple[NetworkCard, ...]:
    """Return the cards that are up, from the texts of /sys/class/infiniband/NAME/ports/1.

    The texts are those of the files rate ("400 Gb/sec (4X NDR)"), state ("4: ACTIVE") and
    link_layer.
    """
    found = [
        NetworkCard(name=name, bytes_per_second=float(read[1]) * 1e9 / 8, layer=layer.strip())
        for name, (rate, state, layer) in texts.items()
        if "ACTIVE" in state and (read := _RATE.fullmatch(rate)) and float(read[1])
    ]
    return tuple(found)


# ---- Slurm

SLURM_QUERY = ("scontrol", "--oneliner", "show", "nodes")
# A key follows a space, as in " JobState="; values may contain spaces, too.
_FIELD = re.compile(r"(?:^| )([A-Za-z][\w/:]*)=")
_UNUSABLE = frozenset(
    (
        *("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "UNKNOWN"),
        *("INVALID_REG", "NOT_RESPONDING"),
    )
)
_SLICE = re.compile(r".*\d+g\.\d+gb.*", re.ASCII | re.IGNORECASE)  # of a GPU, such as 1g.10gb


def fields_in(line: str) -> Mapping[str, str]:
    """Return the fields of a line of `scontrol --oneliner`; the first of two equal keys counts."""
    parts = _FIELD.split(line.strip())
    pairs = zip(parts[1::2], (one.strip() for one in parts[2::2]), strict=True)
    return dict(reversed(list(pairs)))


def slurm_nodes_in(text: str, partition: str | None = None) -> FoundNodes:
    """Return the nodes with GPUs (of a partition) that `scontrol --oneliner show nodes` lists."""
    told = [fields for line in text.splitlines() if "NodeName" in (fields := fields_in(line))]
    if not told:
        raise InputError(f"scontrol shows no nodes: {shown(text.strip()) or 'it prints nothing'}")
    known = {name for one in told for name in one.get("Partitions", "").split(",") if name}
    if partition is not None and partition not in known:
        raise InputError(
            f"no node is in the partition {shown(partition)!r}",
            where="--partition",
            expected=", ".join(sorted(map(shown, known))),
        )
    chosen = [one for one in told if partition in (None, *one.get("Partitions", "").split(","))]
    return _usable(map(_slurm_node, chosen))


def _slurm_node(fields: Mapping[str, str]) -> FoundNode | str:
    """Return a node, or why it is left out; "" for a node without GPUs."""
    name, state = shown(fields["NodeName"]), fields.get("State", "")
    devices = Counter[str]()
    for entry in re.sub(r"\([^)]*\)", "", fields.get("Gres", "")).split(","):
        what, *kinds = entry.split(":")
        if what == "gpu":
            is_counted = bool(kinds) and bool(re.fullmatch(r"\d+", kinds[-1], re.ASCII))
            devices[":".join(kinds[:-1] if is_counted else kinds)] += (
                _count(kinds[-1], f"the GPUs of {name}") if is_counted else 1
            )
    if not devices:
        return ""
    if "*" in state or _UNUSABLE & set(re.split(r"[^A-Z_]+", state)):
        reason = fields.get("Reason", "").partition(" [")[0]
        return f"{name} is {shown(state)}" + (f" ({shown(reason)})" if reason else "")
    whole = Counter({kind: count for kind, count in devices.items() if not _SLICE.fullmatch(kind)})
    if not whole:
        return f"{name} has only slices of GPUs ({shown(next(iter(devices)))})"
    (kind, count), *others = whole.most_common()
    if others:
        every = ", ".join(f"{shown(one)} × {number}" for one, number in whole.most_common())
        return f"{name} has several kinds of GPUs ({every}), and nodes of a cluster file have one"
    hints = re.split(r"[,+]", fields.get("ActiveFeatures", fields.get("AvailableFeatures", "")))
    return FoundNode(name=name, kind=kind, devices=count, hints=tuple(hints))


def _count(text: str, what: str) -> int:
    """Return the number of devices in a text; raises if it is no number, or a huge one."""
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or int(text) > MOST_DEVICES:
        raise InputError(f"{what} are {shown(text)!r}", expected=f"at most {MOST_DEVICES:,}")
    return int(text)


def _usable(found: Iterator[FoundNode | str]) -> FoundNodes:
    every = list(found)
    nodes = tuple(one for one in every if isinstance(one, FoundNode) and one.devices)
    left_out = tuple(one for one in every if isinstance(one, str) and one)
    if not nodes:
        told = f": {left_out[0]}" if left_out else ""
        raise InputError(f"none of {len(every)} nodes has GPUs that can be used{told}")
    return FoundNodes(nodes=nodes, left_out=left_out)


# ---- Kubernetes

KUBERNETES_QUERY = ("kubectl", "get", "nodes", "-o", "json")
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_KIND_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "gpu.nvidia.com/model",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
_SLICED = "nvidia.com/mig-"  # begins the names of resources that are slices of GPUs
# Networks of rented machines, by how the names of their instance types begin.
_RENTED = {
    "p4d": "efa1",
    "p5": "efa2",
    "p6": "efa2",
    "Standard_ND96asr": "infiniband-hdr",
    "Standard_ND96amsr": "infiniband-hdr",
    "Standard_ND96isr": "infiniband-ndr",
}


class _NodeCondition(BaseModel):
    type: str
    status: str


class _NodeMetadata(BaseModel):
    name: str
    labels: dict[str, str] = {}


class _NodeSpec(BaseModel):
    unschedulable: bool = False


class _NodeStatus(BaseModel):
    allocatable: dict[str, str] = {}
    conditions: list[_NodeCondition] = []


class _KubernetesNode(BaseModel):
    metadata: _NodeMetadata
    spec: _NodeSpec = Field(default_factory=_NodeSpec)
    status: _NodeStatus = Field(default_factory=_NodeStatus)


class _KubernetesNodes(BaseModel):
    items: list[_KubernetesNode]


def kubernetes_nodes_in(text: str) -> FoundNodes:
    """Return the nodes with GPUs that `kubectl get nodes -o json` prints."""
    try:
        told = _KubernetesNodes.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"kubectl's answer cannot be read: {shown(first['msg'])} {place}"
        ) from None
    if not told.items:
        raise InputError("kubectl shows no nodes")
    return _usable(map(_kubernetes_node, told.items))


def _kubernetes_node(node: _KubernetesNode) -> FoundNode | str:
    """Return a node, or why it is left out; "" for a node without GPUs."""
    name, labels, there = shown(node.metadata.name), node.metadata.labels, node.status.allocatable
    resource = next((one for one in _RESOURCES if there.get(one, "0") != "0"), None)
    if resource is None:
        has_slices = any(key.startswith(_SLICED) for key in there)
        return f"{name} has only slices of GPUs (MIG)" if has_slices else ""
    kind = next((labels[key] for key in _KIND_LABELS if labels.get(key)), "")
    if "-MIG-" in kind:
        return f"{name} has only slices of GPUs ({shown(kind)})"
    if node.spec.unschedulable:
        return f"{name} takes no pods (cordoned)"
    if not any(one.type == "Ready" and one.status == "True" for one in node.status.conditions):
        return f"{name} is not ready"
    sharing = _count(labels.get("nvidia.com/gpu.replicas", "1"), f"the replicas of {name}")
    memory = labels.get("nvidia.com/gpu.memory", "")
    rented = labels.get("node.kubernetes.io/instance-type", "")
    return FoundNode(
        name=name,
        kind=kind.removesuffix("-SHARED"),
        devices=_count(there[resource], f"the GPUs of {name}") // max(sharing, 1),
        memory_bytes=int(memory) * _MEBIBYTE if re.fullmatch(r"\d{3,9}", memory) else None,
        network=next((one for start, one in _RENTED.items() if rented.startswith(start)), ""),
    )
