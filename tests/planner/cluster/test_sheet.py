"""Tests of the device sheet."""

import os
from pathlib import Path

import pytest

from autopar.planner.cluster.sheet import (
    device_sheet,
    find_device,
    known_fabrics,
    machine_bytes,
)
from autopar.planner.errors import InputError


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("A100-80GB-SXM", "a100-80gb-sxm"),
        ("a100", "a100-80gb-sxm"),
        ("h100", "h100-sxm"),
        ("NVIDIA H100_80GB_SXM", "h100-sxm"),
        ("H100-96GB-HBM2e-SXM", "h100-96gb"),
        ("RTX 3090", "rtx-3090"),
        ("V100-16GB-SXM", "v100-16gb-sxm"),
        ("B200", "b200-sxm"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_has_one_name_and_many_spellings(name: str, canonical: str) -> None:
    assert find_device(name).name == canonical


def test_a_wrong_name_is_answered_by_the_nearest_right_one() -> None:
    with pytest.raises(InputError, match="not known") as caught:
        find_device("h10o-sxm")
    assert "'h100-sxm'" in caught.value.fix


def test_an_a100_has_the_figures_of_its_data_sheet() -> None:
    device = find_device("a100")
    assert device.peak_flops_per_second("bf16") == 312e12
    assert device.memory_bytes == 80 * 2**30
    assert device.memory_bytes_per_second == pytest.approx(2.039e12)
    assert device.link.bytes_per_second == 300e9


def test_a_dtype_without_units_is_refused() -> None:
    with pytest.raises(InputError, match="no bf16 units"):
        find_device("v100").peak_flops_per_second("bf16")


def test_every_device_is_complete_and_has_a_known_fabric() -> None:
    for device in device_sheet().values():
        assert device.fabric in known_fabrics()
        assert device.source
        assert device.devices_per_node <= device.domain
        assert 0 < device.peak_flops_per_second("fp32") < 1e15
        assert device.memory_bytes_per_second < 1e13


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job/step", "job/memory.max"),  # a limit of Slurm's job holds for its steps
        ("0::/", "memory.max"),  # as a container sees its own group
        ("4:memory:/job", "memory/job/memory.limit_in_bytes"),
        ("4:memory:/docker/a", "memory/memory.limit_in_bytes"),
    ],
)
def test_a_machine_has_no_more_memory_than_the_group_of_the_process(
    line: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n{line}\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_bytes(tmp_path, tmp_path / "groups") == whole
    limit = tmp_path / "groups" / file
    limit.parent.mkdir(parents=True)
    for text, expected in (("2147483648\n", 2**31), ("max\n", whole)):
        limit.write_text(text)
        assert machine_bytes(tmp_path, tmp_path / "groups") == expected
