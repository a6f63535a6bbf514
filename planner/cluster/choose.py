"""Makes the cluster that `--gpus`, `--device` and `--nodes` describe."""

from collections.abc import Callable

from autopar.planner.cluster.cluster import Cluster, Node, Origin
from autopar.planner.cluster.detect import local_devices
from autopar.planner.cluster.device import Device
from autopar.planner.cluster.levels import cluster_from
from autopar.planner.cluster.sheet import device_sheet, find_device, known_fabrics, known_links
from autopar.planner.errors import InputError
from autopar.planner.numbers import MOST_DEVICES

DEFAULT_DEVICE = "h100-sxm"


def choose_cluster(gpus: int, device: str | None = None, nodes: int | None = None) -> Cluster:
    """Return the cluster of so many devices; `origin` tells who chose the device."""
    check_count(gpus, "--gpus")
    chosen, origin = device_for(device)
    per_node = _devices_per_node(gpus, nodes, chosen)
    node = usual_node(chosen, per_node)
    count = gpus // per_node
    return cluster_from([node] * count, network=known_fabrics()[chosen.fabric], origin=origin)


def filling_counts(device: str | None, nodes: int | None) -> Callable[[int], bool]:
    """Return whether a number of devices fills its nodes: the usual ones, or so many as given."""
    usual = device_for(device)[0].devices_per_node

    def is_filling(count: int) -> bool:
        return count % (nodes or usual) == 0 or (nodes is None and count < usual)

    return is_filling


def usual_node(device: Device, devices: int, *, is_bridged: bool = False) -> Node:
    """Return a node as the device's makers build it."""
    return Node(
        device=device,
        devices=devices,
        link=device.link,
        bridge=device.bridge if is_bridged else None,
        socket_link=known_links()["socket"] if device.devices_per_socket else None,
    )


def check_count(count: int, where: str) -> None:
    """Refuse a number of devices or nodes that no cluster has."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_DEVICES:
        raise InputError(
            f"{count} is not a number of devices",
            where=where,
            expected=f"a whole number from 1 to {MOST_DEVICES}",
        )


def device_for(name: str | None) -> tuple[Device, Origin]:
    """Return the device of a name; without one the GPUs here, or the usual one; and who chose."""
    if name is not None:
        return find_device(name), Origin.NAMED
    found = local_devices()
    if found:
        return found[0], Origin.DETECTED
    return device_sheet()[DEFAULT_DEVICE], Origin.DEFAULT


def _devices_per_node(gpus: int, nodes: int | None, device: Device) -> int:
    if nodes is None:
        usual = device.devices_per_node
        if gpus <= usual:
            return gpus
        if gpus % usual:
            raise InputError(
                f"{gpus} devices do not fill nodes of {usual}, as {device.name} usually has",
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
