"""What tools tell of real machines becomes a cluster; what cannot be read is told."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.planner.cluster.cluster import Cluster, content_hash
from autopar.planner.cluster.detected import (
    DetectedCluster,
    MeasuredLink,
    MeasuredLinks,
    cluster_text,
    detected,
)
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.cluster.tool_output import (
    FoundNode,
    NetworkCard,
    cards_in,
    gpus_in,
    kubernetes_nodes_in,
    slurm_nodes_in,
    wiring_in,
)
from autopar.planner.errors import InputError
from tests.codegen.launch.test_quoting import HOSTILE
from tests.planner.cluster import samples


def machine(kind: str, table: str = "", *, devices: int = 0, **more: Any) -> FoundNode:
    """Return a machine that was looked at from inside."""
    wiring = wiring_in(table) if table else None
    cards: tuple[NetworkCard, ...] = more.pop("cards", ())
    return FoundNode(
        name="gpu1",
        kind=kind,
        devices=devices or (len(wiring.links) if wiring else 8),
        wiring=wiring,
        pcie_generation=more.pop("generation", None),
        cards=cards,
        **more,
    )


def made(*nodes: FoundNode, links: MeasuredLinks | None = None, **named: str) -> DetectedCluster:
    return detected(nodes, source="test", named=named, measured=links)


def read(found: DetectedCluster) -> Cluster:
    return parse_cluster(cluster_text(found), where="the file")


def test_a_machine_as_the_vendor_builds_it_is_the_data_sheets() -> None:
    for kind, table, name, count in (
        ("NVIDIA A100-SXM4-80GB", samples.DGX_A100, "a100-80gb-sxm", 8),
        ("Tesla V100-SXM2-32GB", samples.DGX_V100, "v100-32gb-sxm", 8),
        ("NVIDIA H100 80GB HBM3", samples.H100, "h100-sxm", 4),
    ):
        node = machine(kind, table, memory_bytes={"v": 32, "a": 80, "h": 80}[name[0]] * 2**30)
        assert content_hash(read(made(node))) == content_hash(choose_cluster(count, name))
        assert "assumed" not in cluster_text(made(node))


def test_nvlinks_that_are_divided_make_a_mesh() -> None:
    (link,) = {one.link for one in read(made(machine("a100", samples.POLARIS))).nodes}
    assert (link.topology, link.bytes_per_second) == ("mesh", 300e9)
    switched = read(made(machine("a100", samples.DGX_A100.replace("NV12", "NV6")))).nodes[0]
    assert (switched.link.topology, switched.link.bytes_per_second) == ("switch", 150e9)


def test_pairs_are_bridged_where_each_gpu_has_one_partner() -> None:
    (node,) = read(made(machine("NVIDIA GeForce RTX 3090", samples.TWO_3090))).nodes
    assert node.bridge is not None
    assert node.bridge.bytes_per_second == 56.25e9
    found = made(machine("NVIDIA RTX A6000", samples.THREE_A6000))
    assert read(found).nodes[0].bridge is None
    assert any("NVLinks between some" in one for one in found.assumed)


def test_gpus_on_several_cpus_are_sockets() -> None:
    def per_socket(table: str) -> int:
        node = machine("NVIDIA A100 80GB PCIe", table, generation=4)
        (found,) = read(made(node)).nodes
        assert found.device.devices_per_socket is not None
        return found.device.devices_per_socket

    assert per_socket(samples.TWO_ON_TWO_CPUS) == 1
    assert per_socket(samples.TWO_ON_ONE_CPU) == 4, "both on one, as the data sheet has it"
    assert per_socket(samples.FOUR_IN_A_CLOUD) == 4, "a virtual machine tells nothing"


def test_the_slots_generation_is_the_links() -> None:
    node = machine("NVIDIA A100 80GB PCIe", samples.TWO_ON_ONE_CPU, generation=3)
    assert read(made(node)).nodes[0].link.bytes_per_second == 16e9
    without_nvlinks = machine("a100", samples.TWO_ON_ONE_CPU, generation=4)
    assert read(made(without_nvlinks)).nodes[0].link.name == "pcie4"


def test_memory_is_the_drivers() -> None:
    text = "Tesla T4, 15360, 3, [N/A]\nTesla T4, 15360, 3, [N/A]\n"
    (gpu, _) = gpus_in(text)
    node = machine(gpu.name, memory_bytes=gpu.memory_bytes, devices=2)
    assert read(made(node)).nodes[0].device.memory_bytes == 15 * 2**30
    with pytest.raises(InputError, match=r"slices \(MIG\)"):
        gpus_in("NVIDIA H100 80GB HBM3, 81559, 5, Enabled")


def test_one_gpu_has_no_links() -> None:
    assert wiring_in(samples.ONE_GB10).links == ((0,),)
    assert len(read(made(machine("h100", samples.ONE_GB10))).nodes) == 1


def test_network_cards_beside_gpus_are_those_that_train() -> None:
    told = {f"mlx5_{place}": samples.CARD_200 for place in range(11)}
    cards = cards_in({**told, "mlx5_11": samples.CARD_DOWN})
    assert len(cards) == 11
    node = machine("a100", samples.DGX_A100, cards=cards)
    found = made(node, replace(node, name="gpu2"))
    assert found.network == {"like": "infiniband-hdr", "cards_per_device": 1.0}
    numbered = machine("h100", samples.H100, cards=cards_in({"mlx5_3": samples.CARD_400}))
    assert made(numbered, numbered).network["cards_per_device"] == 0.25


@pytest.mark.parametrize(
    ("card", "device", "network"),
    [
        (samples.CARD_400, "h100", {"like": "infiniband-ndr", "cards_per_device": 0.125}),
        (
            samples.CARD_ROCE,
            "h100",
            {"like": "roce-400", "cards_per_device": 0.125, "bandwidth": "100 Gb/s"},
        ),
        (samples.CARD_EFA, "a100", {"like": "efa1", "cards_per_device": 0.125}),
    ],
)
def test_a_card_chooses_the_network(
    card: tuple[str, str, str], device: str, network: dict[str, object]
) -> None:
    node = machine(device, cards=cards_in({"one": card}))
    assert made(node, node).network == network
    assert len(read(made(node, node)).levels) == 2


def test_what_slurm_does_not_tell_is_assumed_aloud() -> None:
    found = slurm_nodes_in(samples.A100_AND_V100)
    assert [one.name for one in found.nodes] == ["node-a1", "node-b1", "node-b2"]
    assert found.left_out == ("node-b3 is DOWN*+DRAIN (Not responding)",)
    made_of = detected(found.nodes, source="slurm", named={}, left_out=found.left_out)
    assert made_of.found == (
        "slurm: 1 node of 4 × a100: node-a1",
        "slurm: 2 nodes of 4 × v100: node-b1, node-b2",
    )
    told = "\n".join(made_of.assumed)
    for text in (
        "a100 is a100-80gb-sxm, with 80 GiB",
        "links inside nodes of v100-16gb-sxm are nvlink2",
        "the network is infiniband-edr",
    ):
        assert text in told
    assert [one.devices for one in read(made_of).nodes] == [4, 4, 4]


def test_slurms_words_find_their_devices() -> None:
    for text, device, count in (
        (samples.A40, "a40", 1),
        (samples.B200_SLICES, "b200-sxm", 4),
        (samples.UNTYPED, "h100-sxm", 8),
    ):
        (node,) = made(*slurm_nodes_in(text).nodes).nodes
        assert (node.device, node.devices) == (device, count)


def test_a_node_with_two_kinds_of_gpus_is_left_out_and_told() -> None:
    mixed = samples.A100_AND_V100.replace("gpu:a100:4", "gpu:a100:2,gpu:v100:2", 1)
    (told, _) = slurm_nodes_in(mixed).left_out
    assert told.startswith("node-a1 has several kinds of GPUs (a100 × 2, v100 × 2)")


def test_unknown_words_are_told_together_and_can_be_named() -> None:
    text = samples.A40.replace("gpu:a40:1", "gpu:volta:8").replace("gpua40", "")
    nodes = (*slurm_nodes_in(text).nodes, *slurm_nodes_in(text.replace("volta", "big")).nodes)
    with pytest.raises(InputError, match=r"'volta' is no device[^$]*'big' is no device") as caught:
        made(*nodes)
    assert "--device volta=" in caught.value.fix
    found = made(*nodes, volta="v100-32gb-sxm", big="h200")
    assert [one.device for one in found.nodes] == ["v100-32gb-sxm", "h200-sxm"]
    unnamed = slurm_nodes_in(samples.UNTYPED.replace("h100", "")).nodes
    with pytest.raises(InputError, match="kind of GPU of gpu-st-ml-1 is not told"):
        made(*unnamed)
    assert detected(unnamed, source="slurm", named={"": "h200"}).nodes[0].device == "h200-sxm"


def test_a_partition_has_its_own_nodes() -> None:
    assert len(slurm_nodes_in(samples.A100_AND_V100, "old").nodes) == 2
    for partition, told in (("cpu", "none of 1 nodes has GPUs"), ("none", "cpu, gpu-high, old")):
        with pytest.raises(InputError, match=told):
            slurm_nodes_in(samples.A100_AND_V100, partition)


def test_kubernetes_tells_products_memory_and_rented_networks() -> None:
    eight = {"nvidia.com/gpu": "8"}
    text = samples.kubernetes(
        samples.kubernetes_node("a", samples.H100_LABELS, eight),
        samples.kubernetes_node("b", samples.H100_LABELS, eight),
        samples.kubernetes_node("c", samples.H100_LABELS, eight, ready="Unknown"),
        samples.kubernetes_node("d", {}, {}),
        samples.kubernetes_node("e", samples.NVL_LABELS, {"nvidia.com/mig-1g.12gb": "14"}),
    )
    found = kubernetes_nodes_in(text)
    assert found.left_out == ("c is not ready", "e has only slices of GPUs (MIG)")
    made_of = made(*found.nodes)
    assert made_of.nodes[0].count == 2
    assert made_of.network == {"like": "efa2"}
    shared = {**samples.NVL_LABELS, "nvidia.com/gpu.replicas": "4"}
    shared["nvidia.com/gpu.product"] += "-SHARED"
    text = samples.kubernetes(samples.kubernetes_node("a", shared, eight))
    (node,) = made(*kubernetes_nodes_in(text).nodes).nodes
    assert (node.device, node.devices) == ("h100-nvl", 2), "four pods share each"


def test_unlike_nodes_of_one_device_have_names_of_their_own() -> None:
    first = machine("t4", memory_bytes=15 * 2**30)
    found = made(first, replace(first, memory_bytes=14 * 2**30), replace(first, memory_bytes=None))
    assert [one.device.memory_bytes // 2**30 for one in read(found).nodes] == [15, 14, 16]


def test_measured_links_replace_figures_but_no_mesh() -> None:
    slow = MeasuredLink(bytes_per_second=2e9, alpha_seconds=30e-6)
    links = MeasuredLinks(inside=slow, between=slow)
    node = FoundNode(name="host", kind="cpu", devices=2)
    found = made(node, replace(node, name="other"), links=links)
    cluster = read(found)
    for level in cluster.levels:
        for unit in level.units:
            assert unit.link.bytes_per_second == 2e9
            assert unit.link.alpha_seconds == pytest.approx(30e-6)
            assert (unit.link.efficiency, unit.link.backend) == (1.0, "gloo")
    assert "measured between machines: 2 GB/s, 30 us" in found.found
    polaris = read(made(machine("a100", samples.POLARIS), links=links))
    assert polaris.nodes[0].link.bytes_per_second == 300e9


READERS: tuple[Callable[[str], object], ...] = (
    gpus_in,
    wiring_in,
    slurm_nodes_in,
    kubernetes_nodes_in,
)
BROKEN = (
    "",
    "\n\n",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "No devices were found",
    "slurm_load_node error: Unable to contact slurm controller (connect failure)",
    "No nodes in the system",
    '{"items": null}',
    '{"items": [{"metadata": {}}]}',
    "[" * 100_000,
    "GPU0 GPU1\nGPU0 X NV999999\nGPU1 X",
    "GPU0 GPU1\nGPU0 X",
    "a, " * 5,
    "H100, 99999999999999999999, 5, Disabled",
    "NodeName=a State=IDLE Gres=gpu:h100:99999999999999999999",
    "NodeName=a State=IDLE Gres=gpu:h100:²",
    "NodeName=a State=IDLE Gres=:::,,gpu",
    "NodeName= State= Gres=gpu:0",
    samples.kubernetes(samples.kubernetes_node("a", {}, {"nvidia.com/gpu": "many"})),
    samples.kubernetes(
        samples.kubernetes_node("a", {"nvidia.com/gpu.replicas": "0"}, {"amd.com/gpu": "3"})
    ),
)


def fault(call: Callable[[], object]) -> str:
    """Return what a call raises as an error for people, or ""."""
    try:
        call()
    except InputError as error:
        return error.found
    return ""


@pytest.mark.parametrize("reader", READERS)
def test_texts_that_cannot_be_read_are_told(reader: Callable[[str], Any]) -> None:
    for text in (*BROKEN, *HOSTILE, samples.DGX_A100[:900], samples.A40[:200]):
        told = fault(lambda text=text: reader(text))  # type: ignore[misc]
        nodes = () if told else getattr(reader(text), "nodes", ())
        told = told or fault(lambda nodes=nodes: nodes and made(*nodes))  # type: ignore[misc]
        assert told.isprintable()
        assert len(told) < 400


def test_hostile_names_stay_comments() -> None:
    for text in HOSTILE:
        node = FoundNode(name=text, kind="h100", devices=8)
        found = detected([node], source=text, named={}, left_out=[text])
        assert set(tomllib.loads(cluster_text(found))) == {"nodes"}
        assert read(found).size == 8
