"""Each launcher has its own words for which rank a process is, and scripts know them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.runtime.launchers import (
    TORCHRUN,
    MemoryGroup,
    UnknownPlaceError,
    first_host,
    has_one_device,
    memory_groups,
    place_in,
    usable_cores,
)
from tests.cells import cells
from tests.codegen.kinds import plan_of
from tests.runtime.script_ranks import Launcher, run_script

SLURM = {  # the sixth of seven tasks, on the second of three nodes
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08],big",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1938",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "23456"}
UNDER_TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29513",
}
# rank, world size, local rank, local world size, node, nodes, address
PLACES = {
    "torchrun": (UNDER_TORCHRUN, (9, 16, 1, 8, 1, 2, "first")),
    "torchrun in a step of srun": (SLURM | UNDER_TORCHRUN, (9, 16, 1, 8, 1, 2, "first")),
    "srun": (SLURM, (5, 7, 2, 3, 1, 3, "gpu07")),
    "srun --mpi=pmi2": (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, (5, 7, 2, 3, 1, 3, "gpu07")),
    "mpirun whose daemons srun has started": (
        SLURM | OPEN_MPI | {"SLURM_JOB_NODELIST": "gpu[07-08]"},
        (3, 4, 1, 2, 1, 2, "gpu07"),
    ),
    "mpirun told where the first rank is": (
        OPEN_MPI | {"MASTER_ADDR": "one"},
        (3, 4, 1, 2, 1, 2, "one"),
    ),
    "mpirun that does not tell": (OPEN_MPI, (3, 4, 1, 2, 1, 2, "")),
    "MPICH on one machine": (MPICH, (3, 4, 3, 4, 0, 1, "127.0.0.1")),
    "a pod": (POD, (1, 2, 0, 1, 1, 2, "job-0.job")),
    "processes of one machine": (POD | {"MASTER_ADDR": "::1"}, (1, 2, 1, 2, 0, 1, "::1")),
    "nobody": ({}, (0, 1, 0, 1, 0, 1, "127.0.0.1")),
    "a batch script, which is no step": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        (0, 1, 0, 1, 0, 1, "127.0.0.1"),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_launchers_variables_name_the_place_of_a_rank(name: str) -> None:
    variables, expected = PLACES[name]
    one = place_in(variables)
    ranks = (one.rank, one.world_size, one.local_rank, one.local_world_size)
    assert (*ranks, one.node, one.nodes, one.address) == expected


def test_steps_of_a_job_have_ports_of_their_own_that_all_their_ranks_know() -> None:
    first, other = (place_in(SLURM | {"SLURM_PROCID": rank}) for rank in ("0", "6"))
    assert first.port == other.port
    assert place_in(SLURM | {"SLURM_STEP_ID": "1"}).port != first.port
    assert place_in(SLURM | {"MASTER_PORT": "23456"}).port == place_in(POD).port == 23456
    assert place_in({}).port == 29500


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("gpu[03-08,11],big", "gpu03"),
        ("a[1,3]-b[02-04].site,x", "a1-b02.site"),
        ("n-[7]", "n-7"),
        ("big,gpu[1-2]", "big"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two', which is no whole number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, and WORLD_SIZE is 4"),
        ({"RANK": "0", "WORLD_SIZE": "²"}, "no whole number"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(y2)"}, "which lists no tasks"),
        (SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID is ''"),
        ({"PMIX_RANK": "1"}, "no variable says how many ranks"),
    ],
)
def test_variables_that_make_no_place_are_told(variables: Mapping[str, str], told: str) -> None:
    with pytest.raises(UnknownPlaceError, match=told.replace("(", r"\(")) as caught:
        place_in(variables)
    assert caught.value.fix


def test_a_rank_has_the_one_device_that_srun_shows_it() -> None:
    bound = {"CUDA_VISIBLE_DEVICES": "2"}
    assert has_one_device(place_in(SLURM), bound)
    assert not has_one_device(place_in(SLURM), {})
    assert not has_one_device(replace(place_in(SLURM), launcher=TORCHRUN), bound)


JOINING = """
import json, sys
import torch
import torch.distributed as dist
from autopar.runtime.ranks import start, stop
mesh = start(data=2, timeout=60)
number = torch.tensor([1.0 + mesh.rank])
dist.all_reduce(number)
open(f"{mesh.rank}.json", "w").write(json.dumps(number.item()))
stop(mesh)
"""


def by_srun(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_NODEID": "0"}
    own = {"SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": str(ranks)}
    return step | own | {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": str(port)}


def by_pods(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    return own | {"MASTER_PORT": str(port + 1 if port < 65_535 else 1024)}


@pytest.mark.parametrize("launcher", [by_srun, by_pods])
def test_ranks_join_without_torchrun(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(JOINING, encoding="utf-8")
    ended = run_script(script, ranks=2, launcher=launcher)
    assert ended.codes == (0, 0), ended.printed
    assert [(tmp_path / f"{rank}.json").read_text() for rank in (0, 1)] == ["3.0", "3.0"]


REFUSING = """
from autopar.runtime.ranks import start, tell_errors_once
from autopar.runtime.ranks.leaving import refuse
import torch.distributed as dist
import torch
if __name__ == "__main__":
    tell_errors_once()
    mesh = start(data=2, timeout=60)
    if mesh.rank == 1:
        refuse("rank 1 has no rows", fix="give it some")
    dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_leaves_ends_all_ranks_of_srun_with_one_message(tmp_path: Path) -> None:
    script = tmp_path / "refuse.py"
    script.write_text(REFUSING, encoding="utf-8")
    ended = run_script(script, ranks=2, launcher=by_srun)
    assert ended.codes == (6, 6), ended.printed
    assert ended.printed.count("error: ") == 1, ended.printed
    assert "rank 1 has no rows" in ended.printed


NO_MPIRUN = "there is no Open MPI (Debian: openmpi-bin)"


def has_open_mpi() -> bool:
    if shutil.which("mpirun") is None:
        return False
    asked = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(not has_open_mpi(), reason=NO_MPIRUN)
@pytest.mark.parametrize("kind", cells(("ddp", "pp"), ["pp"]))
def test_mpirun_starts_a_script(kind: str, tmp_path: Path) -> None:
    script = write_script(plan_of(kind), tmp_path)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*("mpirun", "--oversubscribe", "-n", "2", sys.executable, str(script)), "--steps", "2"],
        cwd=tmp_path,
        env=os.environ | as_root | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step      2   loss") == 1
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job/step", "job/memory.max"),  # a limit of Slurm's job holds for its steps
        ("0::/", "memory.max"),  # as a container sees its own group
        ("4:memory:/job", "memory/job/memory.limit_in_bytes"),
        ("4:memory:/docker/a", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_groups_of_a_process_limit_its_memory(line: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n{line}\n")
    groups = tmp_path / "groups"
    assert not [*memory_groups(tmp_path, groups)]
    limit = groups / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert not [*memory_groups(tmp_path, groups)]
    limit.write_text("2147483648\n")
    (found,) = memory_groups(tmp_path, groups)
    assert found == MemoryGroup(limit_bytes=2**31, free_bytes=2**31)
    # of 1.5 GB in use, a third is of files that are not read any more
    used, dropped = (
        ("memory.current", "inactive_file")
        if limit.name == "memory.max"
        else ("memory.usage_in_bytes", "total_inactive_file")
    )
    (limit.parent / used).write_text(f"{3 * 2**29}\n")
    (limit.parent / "memory.stat").write_text(f"anon 7\n{dropped} {2**29}\n")
    (found,) = memory_groups(tmp_path, groups)
    assert found == MemoryGroup(limit_bytes=2**31, free_bytes=2**30)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n"}),
        ("0::/", {"cpu.max": "100000 100000\n"}),
        (
            "4:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
        ),
    ],
)
def test_the_groups_of_a_process_limit_its_cores(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    (tmp_path / "cgroup").write_text(f"{line}\n")
    assert usable_cores(tmp_path, tmp_path) == 8
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path, tmp_path) == 1
