"""Reads published NCCL tables into rows, with which the formulas of collectives are compared."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.planner.cluster.cluster import Cluster, ClusterOrigin, Collective, Link, cluster_from
from autopar.planner.cluster.file import default_node
from autopar.planner.cluster.shape import GroupShape, group_shape, neighbour_shape
from autopar.planner.cluster.sheet import find_device, known_fabrics

MEBIBYTE = 2**20
OPERATIONS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "all2all": Collective.ALL_TO_ALL,
    "p2p": Collective.POINT_TO_POINT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured collective."""

    table: str
    collective: Collective
    payload_bytes: float
    shape: GroupShape
    seconds: float


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth ÷ (payload ÷ time), as nccl-tests defines it."""
    if collective is Collective.POINT_TO_POINT:
        return 1.0
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def machine(device_name: str, *, nodes: int, gpus: int, network: Link | None) -> Cluster:
    """Return a cluster of equal nodes with this device."""
    device = find_device(device_name)
    per_node = gpus // nodes
    fabric = network or known_fabrics()[device.fabric]
    return cluster_from(
        [default_node(device, per_node)] * nodes, network=fabric, origin=ClusterOrigin.NAMED
    )


def shape_of(collective: Collective, cluster: Cluster) -> GroupShape:
    """Return the group of all ranks, or a pair of neighbours for messages."""
    if collective is Collective.POINT_TO_POINT:
        return neighbour_shape(cluster, cluster.size, 1)
    return group_shape(cluster, cluster.size, 1)


def nccl_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of ops_nccl.csv whose machine is stated."""
    for row in records(path):
        device = re.match(r"(A100-40GB-SXM|A100-80GB-SXM|[HB]\d00-\d+GB-SXM)", row["gpu"])
        is_ring_forced = (
            "NVLS off" in row["algo"]
            or "NVLS_ENABLE=0" in row["notes"]
            or "NVLS disabled" in row["notes"]
        )
        nodes = int(row["nodes"])
        if device is None or is_ring_forced or (nodes > 1 and "not stated" in row["inter_bw"]):
            continue
        collective, gpus = OPERATIONS[row["op"]], int(row["gpus"])
        network = known_fabrics()["efa1" if "4x100 Gb/s" in row["inter_bw"] else "efa2"]
        shape = shape_of(collective, machine(device[1], nodes=nodes, gpus=gpus, network=network))
        size = float(row["size_bytes"] or 256 * MEBIBYTE)
        seconds = float(row["time_us"] or 0) * 1e-6 or bus_factor(collective, gpus) * size / (
            float(row["busbw_GBs"]) * 1e9
        )
        tool = (
            "nccl-tests" if row["time_us"] or "nccl-tests" in row["software"] else "framework timer"
        )
        yield Row(
            table=tool, collective=collective, payload_bytes=size, shape=shape, seconds=seconds
        )


def simai_rows(path: Path) -> Iterator[Row]:
    """Yield SimAI's rows that name nodes and GPUs; of all-to-all, those within a node."""
    for row in records(path):
        scale = re.match(r"(\d+)Node-(\d+)GPU|1 Node", row["scale"])
        if (
            scale is None
            or row["table"] == "nvlink_ratio"
            or (row["table"] == "ata_ratio" and scale[1])
        ):
            continue
        nodes, gpus = (int(scale[1]), int(scale[2])) if scale[1] else (1, 8)
        collective = Collective.ALL_TO_ALL if row["table"] == "ata_ratio" else Collective.ALL_GATHER
        shape = shape_of(collective, machine("h100-sxm", nodes=nodes, gpus=gpus, network=None))
        peak = 400e9 if nodes > 1 else 450e9
        size = float(row["size_bytes"])
        seconds = (
            bus_factor(collective, gpus) * size / (float(row["busbw_fraction_of_peak"]) * peak)
        )
        yield Row(
            table="SimAI", collective=collective, payload_bytes=size, shape=shape, seconds=seconds
        )


def simumax_rows(path: Path) -> Iterator[Row]:
    """Yield the long-transfer rates of ops_comm_fit_simumax.csv within a node."""
    for row in records(path):
        ranks = re.search(r"pcie_(\d)x|low_intra_node", row["network"])
        beyond_the_link = float(row["efficiency"]) > 1
        if ranks is None or row["op"] not in OPERATIONS or beyond_the_link:
            continue
        collective, gpus = OPERATIONS[row["op"]], int(ranks[1] or 8)
        shape = shape_of(collective, machine(row["gpu"], nodes=1, gpus=gpus, network=None))
        seconds = bus_factor(collective, gpus) * 2**30 / (float(row["busbw_GBs"]) * 1e9)
        yield Row(
            table="SimuMax fits",
            collective=collective,
            payload_bytes=2**30,
            shape=shape,
            seconds=seconds,
        )


def records(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
