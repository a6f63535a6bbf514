"""Tests of the device sheet."""

import os

import pytest

from autopar.planner.cluster.sheet import (
    device_sheet,
    find_device,
    known_fabrics,
    machine_bytes,
)
from autopar.planner.errors import InputError
from autopar.runtime.launchers import memory_groups


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


def test_a_machine_has_no_more_memory_than_the_groups_of_the_process() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [one.limit_bytes for one in memory_groups()]
    assert 0 < machine_bytes() == min([whole, *limits])
