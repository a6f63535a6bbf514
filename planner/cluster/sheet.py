"""The devices and networks that autopar knows, and this machine's devices."""

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.planner.cluster import toml_reading as reading
from autopar.planner.cluster.cluster import Backend, Device, HostShare, Link, Topology
from autopar.planner.cluster.toml_reading import (
    optional,
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
    parse_watts,
)
from autopar.planner.errors import InputError
from autopar.runtime.launchers import memory_groups

TOPOLOGIES: Mapping[str, Topology] = MappingProxyType({str(one): one for one in Topology})
BACKENDS: Mapping[str, Backend] = MappingProxyType({str(one): one for one in Backend})
LINK_KEYS = (
    "topology",
    "bandwidth",
    "latency",
    "efficiency",
    "reduction_efficiency",
    "ports_per_device",
    "backend",
)
_OF_NODES = ("ports_per_device", "backend")  # the devices choose the backend of a network, too
FABRIC_KEYS = (*(key for key in LINK_KEYS if key not in _OF_NODES), "cards_per_device")
DEVICE_KEYS = (
    *("aliases", "vendor", "architecture", "memory", "memory_bandwidth", "peak", "link", "bridge"),
    *(
        "devices_per_socket",
        "domain",
        "devices_per_node",
        "fabric",
        "launch",
        "power",
        "multiprocessors",
    ),
    *("cache", "usd_per_hour", "source"),
    *("host", "host_memory", "host_memory_bandwidth", "host_bandwidth"),
)
_HOST_KEYS = ("memory", "memory_bandwidth", "bandwidth")
DEFAULT_HOST = "pcie4"
# for a link without a given efficiency: NCCL reaches this share of NVLink's rate
DEFAULT_EFFICIENCY = 0.8


@cache
def known_links() -> Mapping[str, Link]:
    """Return the links within nodes, by name."""
    return MappingProxyType(
        {
            name: link_of(name, table, where=f"link.{name}")
            for name, table in tables("links.toml", "link").items()
        }
    )


@cache
def known_fabrics() -> Mapping[str, Link]:
    """Return the networks between nodes, by name."""
    return MappingProxyType(
        {
            name: fabric_of(name, table, where=f"fabric.{name}")
            for name, table in tables("links.toml", "fabric").items()
        }
    )


@cache
def device_sheet() -> Mapping[str, Device]:
    """Return the devices that autopar knows, by canonical name."""
    return MappingProxyType(
        {
            name: device_of(name, table, where=f"device.{name}")
            for name, table in tables("devices.toml", "device").items()
        }
    )


def find_device(name: str) -> Device:
    """Return the known device with this name or alias; raise if there is none."""
    key = canonical_name(name)
    names = _names()
    if key not in names:
        raise InputError(
            f"the device {name!r} is not known",
            expected="" if _meant(key) else f"one of {', '.join(device_sheet())}",
            fix=_meant(key)
            or "a device of your own goes into a cluster file, see docs/cluster-file.md",
        )
    return device_sheet()[names[key]]


_WHATEVER_IS_HERE = ("cuda", "gpu", "nvidia", "rocm")  # written instead of a device's name


def _meant(key: str) -> str:
    if key in _WHATEVER_IS_HERE:
        return "leave the name out to take the GPUs of this machine"
    if key.isdecimal():
        return "--device says which devices, --gpus how many"
    near = difflib.get_close_matches(key, _names(), n=1)
    return f"did you mean {_names()[near[0]]!r}?" if near else ""


def canonical_name(name: str) -> str:
    """Return a device name in lower case, with dashes and without the vendor."""
    key = name.strip().casefold().replace("_", "-").replace(" ", "-")
    for vendor in ("nvidia-", "amd-", "tesla-", "instinct-"):
        key = key.removeprefix(vendor)
    return key


def link_of(name: str, table: Mapping[str, object], *, where: str) -> Link:
    """Return the link that a table describes."""
    reading.refuse_unknown(table, LINK_KEYS, where=where)
    ports = reading.number(table, "ports_per_device", where=where, default=1.0)
    return _link(name, table, ports=ports, where=where)


def fabric_of(name: str, table: Mapping[str, object], *, where: str) -> Link:
    """Return the network that a table describes."""
    reading.refuse_unknown(table, FABRIC_KEYS, where=where)
    ports = reading.number(table, "cards_per_device", where=where, default=1.0)
    return _link(name, table, ports=ports, where=where)


def _link(name: str, table: Mapping[str, object], *, ports: float, where: str) -> Link:
    return Link(
        name=name,
        topology=reading.choice(table, "topology", TOPOLOGIES, where=where, default="switch"),
        bytes_per_second=reading.figure(table, "bandwidth", parse_bytes_per_second, where=where),
        alpha_seconds=reading.figure(table, "latency", parse_seconds, where=where),
        efficiency=reading.share(table, "efficiency", where=where, default=DEFAULT_EFFICIENCY),
        ports_per_device=ports,
        reduction_efficiency=optional(reading.share, table, "reduction_efficiency", where=where)
        or 0.0,
        backend=reading.choice(table, "backend", BACKENDS, where=where, default="nccl"),
    )


def device_of(
    name: str, table: Mapping[str, object], *, where: str, links: Mapping[str, Link] | None = None
) -> Device:
    """Return the device that a table describes; `links` of the same file replace known links."""
    reading.refuse_unknown(table, DEVICE_KEYS, where=where)
    all_links = {**known_links(), **(links or {})}
    per_node = reading.count(table, "devices_per_node", where=where, default=8)
    return Device(
        name=name,
        vendor=reading.text(table, "vendor", where=where, default="any"),
        architecture=reading.text(table, "architecture", where=where),
        memory_bytes=reading.figure(table, "memory", parse_bytes, where=where),
        memory_bytes_per_second=reading.figure(
            table, "memory_bandwidth", parse_bytes_per_second, where=where
        ),
        peaks=_peaks(reading.required(table, "peak", where=where), where=f"{where}.peak"),
        link=reading.choice(table, "link", all_links, where=where),
        domain=reading.count(table, "domain", where=where, default=per_node),
        devices_per_node=per_node,
        launch_seconds=reading.figure(table, "launch", parse_seconds, where=where, default=4e-6),
        fabric=reading.choice(
            table, "fabric", known_fabrics(), where=where, default="ethernet-100"
        ).name,
        host=_host(table, where=where),
        bridge=optional(reading.choice, table, "bridge", all_links, where=where),
        devices_per_socket=optional(reading.count, table, "devices_per_socket", where=where),
        power_watts=optional(reading.figure, table, "power", parse_watts, where=where),
        multiprocessors=optional(reading.count, table, "multiprocessors", where=where),
        cache_bytes=optional(reading.figure, table, "cache", parse_bytes, where=where),
        usd_per_hour=optional(reading.number, table, "usd_per_hour", where=where),
        source=reading.text(table, "source", where=where, default="cluster file"),
    )


def _host(table: Mapping[str, object], *, where: str) -> HostShare:
    """Return a device's host: a usual one, except for figures that the table gives."""
    known = tables("devices.toml", "host")
    usual = reading.choice(table, "host", known, where=where, default=DEFAULT_HOST)
    own = {key: table.get(f"host_{key}", usual[key]) for key in _HOST_KEYS}
    return HostShare(
        memory_bytes=reading.figure(own, "memory", parse_bytes, where=where),
        memory_bytes_per_second=reading.figure(
            own, "memory_bandwidth", parse_bytes_per_second, where=where
        ),
        bytes_per_second=reading.figure(own, "bandwidth", parse_bytes_per_second, where=where),
    )


def _peaks(value: object, *, where: str) -> tuple[tuple[str, float], ...]:
    table = reading.subtable(value, where=where)
    if not table:
        raise InputError(
            "no peak is given", where=where, fix='write peak = { bf16 = "312 TFLOP/s" }'
        )
    reading.refuse_unknown(
        table, ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4"), where=where
    )
    return tuple(
        (dtype, parse_flops_per_second(rate, where=f"{where}.{dtype}"))
        for dtype, rate in table.items()
    )


@cache
def _names() -> Mapping[str, str]:
    """Map the name and the aliases of each device to its canonical name."""
    names = {name: name for name in device_sheet()}
    for name, table in tables("devices.toml", "device").items():
        for alias in table.get("aliases", ()):
            assert names.setdefault(alias, name) == name, f"{alias} names two devices"
    return MappingProxyType(names)


@cache
def tables(file: str, section: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the tables in a section of devices.toml or links.toml, by their names."""
    found = reading.shipped("cluster", file)[section]
    return MappingProxyType({name: _frozen(table) for name, table in found.items()})


def _frozen(value: Any) -> Any:
    """Return a value of a file in immutable form."""
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(one) for key, one in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


GIBIBYTE = 2**30


_DRIVER_FILES = (
    "/dev/nvidiactl",
    "/dev/nvmap",  # Jetson
    "/dev/dxg",  # WSL
    "/dev/kfd",  # ROCm
)


def local_devices() -> tuple[Device, ...]:
    """Return the GPUs of this machine that torch sees."""
    if not _may_have_gpus():
        return ()
    import torch  # imported here, so that planning for another cluster does not wait for torch

    if not torch.cuda.is_available():
        return ()
    properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    devices = [
        recognised(
            one.name, memory_bytes=one.total_memory, multiprocessors=one.multi_processor_count
        )
        for one in properties
    ]
    return tuple(with_host_memory(one, machine_bytes(), len(devices)) for one in devices)


def machine_bytes() -> int:
    """Return this machine's memory, or the limit of the container or the job, if that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(group.limit_bytes for group in memory_groups())])


def with_host_memory(device: Device, memory_bytes: int, devices: int) -> Device:
    """Return a device of a machine with this memory, which all its devices share."""
    return replace(device, host=replace(device.host, memory_bytes=memory_bytes // devices))


def _may_have_gpus() -> bool:
    """Whether a GPU driver may be there: on Linux, only if a driver's device file exists."""
    return sys.platform != "linux" or any(Path(one).exists() for one in _DRIVER_FILES)


def recognised(name: str, *, memory_bytes: int, multiprocessors: int | None = None) -> Device:
    """Return the known device that the driver names, with the memory that it reports.

    Some drivers leave the form factor out ("NVIDIA H100 80GB HBM3"). Then the result is the device
    of that model with the nearest memory; of several, the one whose name adds the fewest words.
    """
    device = device_like(name, memory_bytes)
    if device is None:
        raise InputError(
            f"this machine has a {name!r}, which autopar does not know",
            fix="name a known device with --device, or describe yours, see docs/cluster-file.md",
        )
    return replace(
        device, memory_bytes=memory_bytes, multiprocessors=multiprocessors or device.multiprocessors
    )


def device_like(name: str, memory_bytes: int | None) -> Device | None:
    """Return the known device with this name, or the nearest of its model.

    If `memory_bytes` is None, names alone decide; of equally near ones, the result is the one with
    the least memory.
    """
    return _by_name(name) or _by_words(name, memory_bytes)


def _by_name(name: str) -> Device | None:
    try:
        return find_device(name)
    except InputError:
        return None


def _by_words(name: str, memory_bytes: int | None) -> Device | None:
    model = canonical_name(name).split("-")[0]
    words = set(canonical_name(name).split("-"))
    candidates = [one for key, one in device_sheet().items() if model in key.split("-")]
    return min(
        candidates,
        key=lambda one: (
            round(abs(one.memory_bytes - (memory_bytes or one.memory_bytes)) / (4 * GIBIBYTE)),
            len(set(one.name.split("-")) - words),
            one.memory_bytes if memory_bytes is None else 0,
        ),
        default=None,
    )
