"""Turns the machine columns of a row into a cluster: its device, its nodes, its network."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autopar.planner.cluster.cluster import (
    Cluster,
    ClusterOrigin,
    Device,
    Link,
    Machine,
    cluster_from,
)
from autopar.planner.cluster.file import default_node
from autopar.planner.cluster.sheet import (
    canonical_name,
    device_sheet,
    find_device,
    known_fabrics,
)
from autopar.planner.errors import InputError

_MEMORY = re.compile(r"(\d+)\s*gi?b", re.IGNORECASE)
_POWER = re.compile(r"(\d+)\s*w\b", re.IGNORECASE)
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*tb/s", re.IGNORECASE)
_PER_DIRECTION = re.compile(r"(\d+(?:\.\d+)?)\s*gb/s/dir", re.IGNORECASE)
_CARDS = re.compile(r"(\d+)\s*x\s*(?:[a-z-]+\s+)?(\d+)\s*gb", re.IGNORECASE)
_PER_NODE = re.compile(r"(\d+)\s*gb/s\s+per\s+node")
_PER_DEVICE = re.compile(r"(\d+)\s*gb/s\s+(?:\w+\s+)?per\s+gpu", re.IGNORECASE)
_BITS = 1e9 / 8


@lru_cache(maxsize=256)
def cluster_of(gpu: str, gpus: int, per_node: int, intra_bw: str, inter_bw: str) -> Cluster:
    """Return the cluster that these columns describe; a network not stated is the usual one."""
    device = device_of(gpu)
    if per_node > gpus:
        per_node = gpus
    if gpus % per_node:
        raise InputError(f"{gpus} devices do not fill nodes of {per_node}")
    node = _node(device, per_node, intra_bw)
    fabric = _fabric(device, per_node, inter_bw)
    return cluster_from([node] * (gpus // per_node), network=fabric, origin=ClusterOrigin.NAMED)


def device_of(text: str) -> Device:
    """Return the device of a text such as "H100-96GB-HBM2e-SXM (500W, 2.4TB/s)".

    It is the device of that chip and form whose memory is nearest. Memory, power and bandwidth that
    the text states replace those of the sheet.
    """
    name = canonical_name(text.split("(")[0])
    device = _named(name) or _nearest(name, text)
    memory, power, bandwidth = (pattern.search(text) for pattern in (_MEMORY, _POWER, _BANDWIDTH))
    return replace(
        device,
        peaks=_with_bf16(device.peaks),
        memory_bytes=int(memory[1]) * 2**30 if memory else device.memory_bytes,
        power_watts=float(power[1]) if power else device.power_watts,
        memory_bytes_per_second=float(bandwidth[1]) * 1e12
        if bandwidth
        else device.memory_bytes_per_second,
    )


def _with_bf16(peaks: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    """Let devices without bf16 run at their fp16 peak: the planner has one 16-bit precision."""
    known = dict(peaks)
    if "bf16" in known or "fp16" not in known:
        return peaks
    return (*peaks, ("bf16", known["fp16"]))


def _named(name: str) -> Device | None:
    """Return the device that goes by this very name or alias."""
    try:
        return find_device(name)
    except InputError:
        return None


def _nearest(name: str, text: str) -> Device:
    words = set(name.split("-"))
    chips = {known.split("-")[0] for known in device_sheet()}
    chip = next((word for word in name.split("-") if word in chips), None)
    if chip is None:
        raise InputError(f"the device {text!r} is not known", expected=", ".join(sorted(chips)))
    memory = _MEMORY.search(text)

    def farness(device: Device) -> tuple[int, float]:
        own = set(device.name.split("-"))
        other_form = len((own ^ words) & {"sxm", "pcie", "nvl", "oam"})
        wanted = int(memory[1]) * 2**30 if memory else device.memory_bytes
        return other_form, abs(device.memory_bytes - wanted)

    alike = [one for known, one in device_sheet().items() if known.split("-")[0] == chip]
    return min(alike, key=farness)


def _node(device: Device, per_node: int, intra_bw: str) -> Machine:
    node = default_node(device, per_node)
    told = _PER_DIRECTION.search(intra_bw)
    if told is None:
        return node
    link = replace(node.link, bytes_per_second=float(told[1]) * 1e9)
    return replace(node, link=link)


def _fabric(device: Device, per_node: int, inter_bw: str) -> Link:
    """Return the stated network, with the latency and efficiency of the usual one."""
    usual = known_fabrics()[device.fabric]
    if cards := _CARDS.search(inter_bw):
        return _carded(usual, cards=int(cards[1]), gigabits=float(cards[2]), per_node=per_node)
    if device_rate := _PER_DEVICE.search(inter_bw):
        return _carded(usual, cards=per_node, gigabits=float(device_rate[1]), per_node=per_node)
    if node_rate := _PER_NODE.search(inter_bw.casefold()):
        share = float(node_rate[1]) / per_node
        return _carded(usual, cards=per_node, gigabits=share, per_node=per_node)
    return usual


def _carded(usual: Link, *, cards: int, gigabits: float, per_node: int) -> Link:
    return replace(usual, bytes_per_second=gigabits * _BITS, ports_per_device=cards / per_node)
