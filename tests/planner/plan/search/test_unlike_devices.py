"""Tests that a group of unlike devices counts with the slowest rate and the least memory of all."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import parse_cluster
from autopar.planner.cluster.shape import different_kinds, kinds_of_blocks
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import recompute_words
from tests.planner.plan.searches import TINY_GPT2, planned

QUICK, SLOW = "a100-80gb-sxm", "v100-32gb-sxm"
MIB = 2**20


def cluster(*nodes: str, devices: int = 2) -> Cluster:
    """Nodes of so many devices each, on one network."""
    sections = "".join(f'[[nodes]]\ndevice = "{one}"\ndevices = {devices}\n' for one in nodes)
    return parse_cluster(f'{sections}[network]\nlike = "infiniband-hdr"\n', where="test")


def shared(*nodes: str, **places: Any) -> Plan:
    """The plan in which all devices share the data."""
    size = 2 * len(nodes)
    pins: dict[str, Any] = {"pins__dp": size, "global_batch": 4 * size, "precision": "fp16"}
    return planned(TINY_GPT2, cluster(*nodes), **{**pins, **places})


def test_ranks_that_share_data_wait_for_the_slowest_device() -> None:
    mixed, slow, quick = (
        shared(*nodes).prediction.step_seconds
        for nodes in ((QUICK, SLOW), (SLOW, SLOW), (QUICK, QUICK))
    )
    assert quick < slow
    assert mixed == pytest.approx(slow, rel=0.02)  # the links inside a node differ


@pytest.mark.parametrize("nodes", [(QUICK, SLOW), (SLOW, QUICK)])
def test_a_plan_fits_the_device_with_least_memory(nodes: tuple[str, str]) -> None:
    """A share of memory that suffices on the large device alone makes the plan recompute."""
    rows = {"global_batch": 1024, "pins__microbatch": 256, "pins__zero": 0}
    roomy = shared(*nodes, **rows)
    wanted = roomy.prediction.peak_memory.device_bytes - 16 * MIB
    tight = shared(*nodes, **rows, limits__memory=f"{100 * wanted / (32 * 1024 * MIB):.4f}%")
    assert recompute_words(roomy.stages) == "none"
    assert tight.prediction.peak_memory.device_bytes <= wanted + MIB
    assert recompute_words(tight.stages) != "none"


def test_blocks_know_the_kinds_of_their_devices_in_any_order() -> None:
    machines = cluster(QUICK, SLOW, SLOW, QUICK)
    kinds = [{device.name for device in kind} for kind in kinds_of_blocks(machines, 4)]
    assert kinds == [{QUICK}, {SLOW}, {SLOW}, {QUICK}]
    first, last = kinds_of_blocks(machines, 2)
    assert first is last  # one of each, whichever comes first
    assert len(different_kinds(machines, 2)) == 1
