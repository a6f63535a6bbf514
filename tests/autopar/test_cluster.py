"""`autopar cluster detect` asks the tools that are there; plans take the file that it writes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from autopar.planner.cluster.detected import DetectedCluster
from autopar.planner.cluster.file import read_cluster
from tests.autopar.commands import Autopar
from tests.autopar.mistakes import MODEL
from tests.planner.cluster import samples

GPUS = "NVIDIA A100-SXM4-40GB, 40960, 4, Disabled\n" * 4
Tools = Callable[..., None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Return what puts programs of these names, which print these texts, in the place of all."""

    def put(**texts: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        for name in {one.replace("_", "-").partition("-topo")[0] for one in texts}:
            own = name.replace("-", "_")
            which = f'[ "$1" = topo ] && exec /bin/cat {folder}/{own}_topo.txt\n'
            program = folder / name
            program.write_text(f"#!/bin/sh\n{which}exec /bin/cat {folder}/{own}.txt\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return put


def test_slurm_tells_unlike_nodes_and_a_plan_takes_the_file(autopar: Autopar, tools: Tools) -> None:
    tools(scontrol=samples.A100_AND_V100)
    ran = autopar("cluster", "detect")
    assert ran.code == 0, ran.err
    assert "Written: cluster.toml, 12 devices" in ran.out
    assert "found: slurm: 2 nodes of 4 × v100" in ran.out
    assert "assumed: a100 is a100-80gb-sxm" in ran.out
    assert "node-b3 is DOWN" in ran.err
    assert [one.devices for one in read_cluster(Path("cluster.toml")).nodes] == [4, 4, 4]
    Path("model.py").write_text(MODEL, encoding="utf-8")
    planned = ("plan", "model.py", "--cluster", "cluster.toml", "--precision", "fp32")
    ran = autopar(*planned, "--global-batch", "12", "--pin", "pp=1,tp=1", "-o", "out")
    assert ran.code == 0, ran.err
    assert "4 × v100-16gb-sxm" in ran.out + ran.err
    assert autopar("cluster", "detect", "--partition", "old").code == 0, "its own file is replaced"
    Path("cluster.toml").write_text("[[nodes]]\n", encoding="utf-8")
    assert autopar("cluster", "detect").code == 2, "and no other one"


def test_a_node_of_slurm_stands_for_those_like_it(autopar: Autopar, tools: Tools) -> None:
    text = samples.A100_AND_V100.replace("NodeName=node-a1", f"NodeName={socket.gethostname()}")
    tools(scontrol=text, nvidia_smi=GPUS, nvidia_smi_topo=samples.POLARIS)
    assert autopar("cluster", "detect").code == 0
    first, *others = read_cluster(Path("cluster.toml")).nodes
    assert (first.device.memory_bytes, first.link.topology) == (40 * 2**30, "mesh")
    assert {one.link.name for one in others} == {"nvlink2"}


def test_a_source_that_does_not_answer_is_told_and_the_next_one_is_asked(
    autopar: Autopar, tools: Tools
) -> None:
    tools(scontrol="", nvidia_smi=GPUS, nvidia_smi_topo=samples.POLARIS)
    ran = autopar("cluster", "detect")
    assert ran.code == 0, ran.err
    assert "note: --from slurm: " in ran.err
    assert "found: here: 1 node of 4 × NVIDIA A100-SXM4-40GB" in ran.out
    assert autopar("cluster", "detect", "--from", "slurm").code == 2, "if it alone is to be asked"
    assert autopar("cluster", "detect", "--partition", "gpu").code == 2


def test_this_machine_and_kubernetes_are_asked_without_slurm(
    autopar: Autopar, tools: Tools
) -> None:
    tools(kubectl=samples.kubernetes(samples.kubernetes_node("a", samples.H100_LABELS, EIGHT)))
    ran = autopar("cluster", "detect", "-o", "k.toml", "--json")
    told = json.loads(ran.out)
    adapter = TypeAdapter(DetectedCluster)
    assert adapter.dump_python(adapter.validate_python(told), mode="json") == told
    assert told["nodes"][0]["device"] == "h100-sxm"
    tools(nvidia_smi=GPUS, nvidia_smi_topo="no table")
    ran = autopar("cluster", "detect")
    assert ran.code == 0
    assert "links between GPUs are not known: nvidia-smi topo -m shows no table" in ran.err
    assert "links inside nodes of a100-40gb-sxm are nvlink3, as usual" in ran.out
    tools(nvidia_smi=GPUS + "Tesla T4, 15360, 3, Disabled\n")
    ran = autopar("cluster", "detect", "--from", "here")
    assert "left out: 1 × Tesla T4" in ran.err
    assert read_cluster(Path("cluster.toml")).size == 4


EIGHT = {"nvidia.com/gpu": "8"}


@pytest.mark.usefixtures("forked_python")
def test_the_ranks_of_a_start_measure_the_links_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "autopar",
    )
    words = ("cluster", "detect", "--from", "ranks")
    ran = subprocess.run([*start, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Written: cluster.toml, 2 devices") == 1
    (node,) = read_cluster(Path("cluster.toml")).nodes
    assert (node.device.is_cpu, node.devices, node.link.efficiency) == (True, 2, 1.0)
    assert 1e7 < node.link.bytes_per_second < 1e11
    assert 1e-7 < node.link.alpha_seconds < 1e-1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "this machine has no GPUs, no Slurm and no Kubernetes"),
        (("--from", "slurm"), "there is no command scontrol"),
        (("--from", "condor"), "slurm, kubernetes, here, ranks"),
        (("--from", "here", "--partition", "a"), "--partition is of Slurm"),
        (("--from", "ranks"), "--from ranks needs several processes"),
        (("--from", "here", "--device", "h1000"), "this machine has no GPUs"),
    ],
)
def test_mistakes_are_told(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = autopar("cluster", "detect", *words)
    assert ran.code == 2
    assert told in ran.err
    assert not Path("cluster.toml").exists()
