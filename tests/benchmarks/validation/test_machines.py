"""Devices and networks from the words of a table."""

from __future__ import annotations

import pytest

from autopar.planner.errors import InputError
from benchmarks.validation.machines import cluster_of, device_of


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("A100-80GB-SXM", "a100-80gb-sxm", 80),
        ("A100-40GB-SXM (DGX A100)", "a100-40gb-sxm", 40),
        ("H100-80GB-SXM", "h100-sxm", 80),
        ("H200-141GB-SXM", "h200-sxm", 141),
        ("GB200-186GB (NVL72)", "gb200", 186),
        ("NVIDIA H100", "h100-sxm", 80),
    ],
)
def test_a_device_is_the_nearest_of_its_chip(text: str, name: str, gib: int) -> None:
    assert device_of(text).name == name
    assert device_of(text).memory_bytes == gib * 2**30


def test_what_the_text_tells_of_a_device_replaces_its_sheet() -> None:
    device = device_of("H100-96GB-HBM2e-SXM (500W, 2.4TB/s)")
    assert device.memory_bytes == 96 * 2**30
    assert device.power_watts == 500
    assert device.memory_bytes_per_second == 2.4e12


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="not known"):
        device_of("Abacus-3000")


@pytest.mark.parametrize(
    ("inter_bw", "gigabytes_per_second", "cards"),
    [
        ("800 Gb/s per node (4x200Gb HDR)", 25.0, 0.5),
        ("4x Omni-Path 100 Gb/s per node", 12.5, 0.5),
        ("8x200 Gb/s HDR IB per node", 25.0, 1.0),
        ("400 Gb/s per GPU RDMA", 50.0, 1.0),
        ("1600 Gb/s per node (RoCE)", 25.0, 1.0),
        ("", 25.0, 1.0),
    ],
)
def test_the_network_is_what_the_row_tells(
    inter_bw: str, gigabytes_per_second: float, cards: float
) -> None:
    cluster = cluster_of("A100-80GB-SXM", 16, 8, "", inter_bw)
    network = cluster.levels[-1].units[0].link
    assert network.bytes_per_second == gigabytes_per_second * 1e9
    assert network.ports_per_device == cards


def test_the_rate_inside_a_node_is_what_the_row_tells() -> None:
    cluster = cluster_of("A100-80GB-SXM", 8, 8, "NVLink3 250 GB/s/dir", "")
    assert cluster.nodes[0].link.bytes_per_second == 250e9


def test_devices_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="do not fill"):
        cluster_of("A100-80GB-SXM", 12, 8, "", "")
