"""Tests of clusters from --gpus, --device and --nodes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autopar.planner.cluster import file as choose
from autopar.planner.cluster import sheet
from autopar.planner.cluster.cluster import ClusterOrigin, Device, content_hash
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.sheet import recognised


def test_nodes_divide_the_devices() -> None:
    cluster = choose_cluster(16, "h100-sxm", 4)
    assert [node.devices for node in cluster.nodes] == [4, 4, 4, 4]
    assert cluster.size == 16
    assert cluster.origin is ClusterOrigin.NAMED


def test_without_nodes_they_are_of_the_usual_size() -> None:
    assert len(choose_cluster(64, "h100").nodes) == 8
    assert len(choose_cluster(4, "h100").nodes) == 1
    assert len(choose_cluster(6, "cpu").nodes) == 1


def test_without_a_device_and_gpus_the_default_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "local_devices", lambda: ())
    cluster = choose_cluster(8)
    assert cluster.origin is ClusterOrigin.DEFAULT
    assert cluster.devices[0].name == "h100-sxm"


def test_without_a_device_those_of_the_machine_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recognised("NVIDIA A100-SXM4-40GB", memory_bytes=40 * 2**30)
    monkeypatch.setattr(choose, "local_devices", lambda: (found,))
    cluster = choose_cluster(8)
    assert cluster.origin is ClusterOrigin.DETECTED
    assert cluster.devices[0].name == "a100-40gb-sxm"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch is asked where GPUs are")
def test_a_machine_without_a_driver_does_not_import_torch_to_look_for_gpus() -> None:
    code = (
        "import sys; from autopar.planner.cluster.file import choose_cluster; "
        "print(choose_cluster(8).origin, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == f"{ClusterOrigin.DEFAULT} False\n"


def test_where_a_driver_is_torch_says_which_gpus_it_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidiactl"
    seen = SimpleNamespace(name="NVIDIA L4", total_memory=22 * 2**30, multi_processor_count=58)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    monkeypatch.setattr(sheet, "_DRIVER_FILES", (str(driver),))
    assert sheet.local_devices() == ()
    driver.touch()
    assert [one.name for one in sheet.local_devices()] == ["l4", "l4"]


@pytest.mark.parametrize(
    ("driver_name", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.6, "h100-nvl"),
        ("NVIDIA A100 80GB PCIe", 80.0, "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", 40.0, "a100-40gb-pcie"),
        ("Tesla V100-SXM2-32GB", 32.0, "v100-32gb-sxm"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("AMD Instinct MI300X", 192.0, "mi300x"),
    ],
)
def test_the_names_of_drivers_are_recognised(driver_name: str, gib: float, name: str) -> None:
    device: Device = recognised(driver_name, memory_bytes=int(gib * 2**30))
    assert device.name == name
    assert device.memory_bytes == int(gib * 2**30)


def test_equal_clusters_have_equal_hashes_and_others_do_not() -> None:
    assert content_hash(choose_cluster(16, "h100")) == content_hash(
        choose_cluster(16, "H100-SXM", 2)
    )
    assert content_hash(choose_cluster(16, "h100")) != content_hash(choose_cluster(16, "h100", 4))
    assert content_hash(choose_cluster(16, "h100")) != content_hash(choose_cluster(16, "h200"))
