"""The first devices of a cluster are the cluster that a file of fewer nodes describes."""

from __future__ import annotations

import pytest

from autopar.planner.cluster.file import first_devices, parse_cluster, prefix_sizes
from autopar.planner.errors import InputError

NETWORK = '[network]\nlike = "infiniband-hdr"\n'
RACKS = """
[racks]
nodes_per_rack = 2
bandwidth = "200 Gb/s"
latency = "8 us"
cards_per_device = 0.25
"""


def text(device: str, nodes: int, devices: int, more: str = "", tail: str = NETWORK) -> str:
    return f'[[nodes]]\ncount = {nodes}\ndevice = "{device}"\ndevices = {devices}\n{more}{tail}'


@pytest.mark.parametrize(
    ("device", "devices", "more"),
    [
        ("a100-80gb-sxm", 8, ""),
        ("v100-16gb-pcie", 8, ""),  # sockets of four
        ("a100-80gb-pcie", 8, "bridged = true\n"),
        ("gb200", 4, ""),  # one domain over many nodes
    ],
)
@pytest.mark.parametrize("tail", [NETWORK, NETWORK + RACKS], ids=["flat", "racks"])
def test_whole_nodes_are_what_a_file_of_so_many_describes(
    device: str, devices: int, more: str, tail: str
) -> None:
    whole = parse_cluster(text(device, 40, devices, more, tail), where="test")
    for nodes in (1, 2, 3, 18, 19, 39):
        fewer = parse_cluster(text(device, nodes, devices, more, tail), where="test")
        assert first_devices(whole, nodes * devices) == fewer
    for count in (1, 2, 3):
        part = parse_cluster(text(device, 1, count, more, tail), where="test")
        assert first_devices(whole, count) == part


def test_unequal_nodes_are_taken_in_their_order() -> None:
    source = text("a100-80gb-sxm", 1, 8, tail="") + text("v100-32gb-sxm", 2, 4)
    whole = parse_cluster(source, where="test")
    assert prefix_sizes(whole) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    fewer = text("a100-80gb-sxm", 1, 8, tail="") + text("v100-32gb-sxm", 1, 4)
    assert first_devices(whole, 12) == parse_cluster(fewer, where="test")
    assert first_devices(whole, 16) is whole


def test_a_part_of_a_later_node_is_refused() -> None:
    whole = parse_cluster(text("a100-80gb-sxm", 3, 8), where="test")
    with pytest.raises(InputError, match="12 of the 24 devices do not make whole nodes"):
        first_devices(whole, 12)
