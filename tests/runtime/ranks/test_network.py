"""Nodes whose own name means loopback find the interface by which the others reach them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.runtime.ranks.network import GLOO, NCCL, _addresses_towards, _interfaces
from tests.codegen.two_nodes import CABLE, HOST, start_on, two_nodes, why_not

pytestmark = pytest.mark.usefixtures("forked_python")
WHY_NOT = why_not()
JOINING = f"""
import json, os
import torch
import torch.distributed as dist
os.environ |= dict(RANK="NODE", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE="2")
os.environ |= dict(MASTER_ADDR="{HOST}", MASTER_PORT="29517")
os.environ |= {{own}}[NODE]
from autopar.runtime.ranks.mesh import start, stop
mesh = start(pipeline=1, data=2, tensor=1, timeout=600)
number = torch.tensor([1.0 + mesh.rank])
dist.all_reduce(number)
print(json.dumps([number.item(), os.environ["{GLOO}"], os.environ["{NCCL}"]]))
stop(mesh)
"""


def joined(folder: Path, *own: dict[str, str]) -> list[tuple[int, str, str]]:
    """Start a rank on each of two nodes with variables of its own; return how each has ended."""
    with two_nodes() as nodes:
        jobs = start_on(nodes, folder, "-c", JOINING.format(own=own))
        # a rank that waits until its own time is over, as in JOINING, fails here
        told = [job.communicate(timeout=120) for job in jobs]
    return [(job.returncode, *texts) for job, texts in zip(jobs, told, strict=True)]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_nodes_join_by_the_interface_between_them_unless_another_is_set(tmp_path: Path) -> None:
    found = joined(tmp_path, {}, {NCCL: "mine"})
    assert [code for code, _, _ in found] == [0, 0], found
    told = [json.loads(text) for _, text, _ in found]
    assert told == [[3.0, CABLE, f"={CABLE}"], [3.0, CABLE, "mine"]]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_nodes_that_do_not_reach_each_other_say_on_each_what_to_set(tmp_path: Path) -> None:
    found = joined(tmp_path, {GLOO: "lo"}, {GLOO: "lo"})
    assert [code for code, _, _ in found] == [6, 6], found
    for _, _, text in found:
        assert text.count("error: ") == 1
        assert f"fix: set {GLOO} and {NCCL} on each node" in text
        assert "Traceback" not in text


def test_the_interface_that_leads_to_an_address_has_the_own_address() -> None:
    first, own = _addresses_towards("127.0.0.1", 1)
    assert first == own == "127.0.0.1"
    assert ("lo", own) in set(_interfaces())
