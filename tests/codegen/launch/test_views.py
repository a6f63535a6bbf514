"""Jobs ask for the plan's machines, and no name changes their shape."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml

from autopar.codegen.launch.settings import read_settings
from autopar.codegen.launch.views import TARGETS, Content, job_of, launch_files
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import StoredPlan
from tests.codegen.launch.test_quoting import HOSTILE
from tests.codegen.plans import pinned_plan

CONTENT = Content(
    python="3.11", packages=("torch==2.13.0",), folders=("autopar",), files=("m.py", "train.py")
)


@cache
def plan() -> StoredPlan:
    """Return a plan for two nodes of eight GPUs."""
    found = pinned_plan("mnist.py", data=16, device="h100-sxm", microbatch=1, global_batch=16)
    assert [node.devices for node in found.cluster.nodes] == [8, 8]
    return found


def files(
    target: str, *given: str, of: StoredPlan | None = None, words: Sequence[str] = ()
) -> dict[str, str]:
    """Return the texts of a job's files."""
    settings, one = read_settings(target, given), of or plan()
    job = job_of(
        one, target, settings, content=CONTENT, arguments=tuple(words), metrics="metrics.jsonl"
    )
    return {one.name: one.text for one in launch_files(job)}


def is_shell(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_job_for_slurm_asks_for_the_plans_machines() -> None:
    wanted = ("partition=big", "account=me", "time=2-00:00:00", "memory=500")
    text = files("slurm", *wanted, words=["--steps", "10"])["job.sbatch"]
    directives = {line for line in text.splitlines() if line.startswith("#SBATCH ")}
    options = (
        "nodes=2",
        "gres=gpu:8",
        "partition=big",
        "account=me",
        "time=2-00:00:00",
        "mem=500G",
    )
    assert {f"#SBATCH --{option}" for option in options} <= directives
    assert {"#SBATCH --signal=USR1@300", "#SBATCH --requeue"} <= directives
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert "train.py --steps 10" in text
    assert is_shell(text)


def test_jobs_for_kubernetes_are_gangs_with_the_plans_devices() -> None:
    wanted = ("queue=q", "volume=disk", "image=me/x:1", "time=01:00:00", "topology=rack")
    found = files("kubernetes", *wanted)
    (jobset,) = documents(found["jobset.yaml"])
    runtime, trainjob = documents(found["trainjob.yaml"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    assert job["activeDeadlineSeconds"] == trainjob["spec"]["activeDeadlineSeconds"] == 3600
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["image"] == trainjob["spec"]["trainer"]["image"] == "me/x:1"
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    for one in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        assert one["failurePolicy"]["maxRestarts"] == 3
    assert jobset["metadata"]["labels"] == trainjob["metadata"]["labels"]
    name = jobset["metadata"]["name"]
    assert f"{name}-node-0-0.{name}" in container["command"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "volume": "/volume"}
    assert trainjob["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert trainjob["spec"]["trainer"]["numNodes"] == 2
    assert "trainingRuntimeSpec" in trainjob["spec"]["runtimePatches"][0]
    assert "Dockerfile" in found


def test_a_task_for_skypilot_names_the_device() -> None:
    (task,) = documents(files("skypilot", "volume=bucket")["sky.yaml"])
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["file_mounts"]["/volume"]["name"] == "bucket"
    assert is_shell(task["run"])


def test_a_plan_for_cpus_asks_for_no_devices() -> None:
    on_cpus = pinned_plan("mnist.py", data=2, microbatch=4)
    assert "gres" not in files("slurm", of=on_cpus)["job.sbatch"]
    (jobset,) = documents(files("kubernetes", of=on_cpus)["jobset.yaml"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert set(job["containers"][0]["resources"]["limits"]) == {"cpu"}


def test_unlike_nodes_are_refused() -> None:
    first, second = plan().cluster.nodes
    unlike = replace(plan().cluster, nodes=(first, replace(second, devices=4)))
    with pytest.raises(InputError, match=r"unlike \(8 h100-sxm, 4 h100-sxm\)"):
        files("slurm", of=replace(plan(), cluster=unlike))


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_names_never_become_more_than_words(target: str) -> None:
    usual = shapes(files(target, words=["--data", "word"]))
    for text in HOSTILE:
        named = replace(plan(), model=replace(plan().model, name=text))
        assert shapes(files(target, of=named, words=["--data", "word"])) == usual
        try:
            found = files(target, words=["--data", text])
        except InputError:
            assert not text.isprintable() or len(text) > 4096
        else:
            assert shapes(found) == usual


def shapes(found: dict[str, str]) -> object:
    """Return what a name must not change: numbers of lines, directives, keys of documents."""
    lines = {name: len(text.splitlines()) for name, text in found.items()}
    documented = {
        name: [keys_of(one) for one in documents(text)]
        for name, text in found.items()
        if name.endswith(".yaml")
    }
    scripts = [text for name, text in found.items() if name == "job.sbatch"]
    scripts += [one["run"] for one in documents(found.get("sky.yaml", ""))]
    assert all(map(is_shell, scripts))
    begun = [line.partition("=")[0] for text in scripts for line in text.splitlines()]
    return lines, documented, [line for line in begun if line.startswith("#SBATCH")]


def documents(text: str) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(text) if one is not None)


def keys_of(value: object) -> object:
    if isinstance(value, dict):
        return {key: keys_of(one) for key, one in value.items()}
    return [keys_of(one) for one in value] if isinstance(value, list) else type(value)
