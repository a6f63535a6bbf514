"""Finds this process's place among the ranks, and the memory and cores that it may use.

A launcher passes the place in environment variables. torchrun and Kubernetes set those that torch
reads. srun, and the mpirun of Open MPI and MPICH, set others, which name neither the first rank's
host nor a free port.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_USUAL_PORT = 29500  # torchrun's default
_PORTS = range(12_000, 32_000)  # below the ports that Linux gives to outgoing connections
_LOCALHOST = "127.0.0.1"


class UnknownPlaceError(ValueError):
    """The variables do not say which rank this is; `fix` says what to set."""

    def __init__(self, found: str, *, fix: str) -> None:
        super().__init__(found)
        self.fix = fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher, and the environment variable that it sets for each fact; "" if it sets none."""

    name: str
    start: str  # the command for COUNT ranks
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    tasks_of_nodes: str = ""  # ranks of each node, "4(x2),3"; for launchers without the above
    node: str = ""
    nodes: str = ""
    hosts: str = ""  # the names of all nodes, "gpu[01-04],big"
    job: tuple[str, ...] = ()  # together they identify this start; equal on all its ranks


TORCHRUN = Launcher(
    name="torchrun",
    start="torchrun --nproc-per-node COUNT",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
)
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")
# The first launcher whose rank and world size are set is taken. mpirun may start its daemons with
# srun, whose variables the ranks then inherit; so srun comes after mpirun.
LAUNCHERS = (
    TORCHRUN,
    Launcher(
        name="mpirun",
        start="mpirun -n COUNT python",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        hosts="SLURM_JOB_NODELIST",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="mpirun",
        start="mpirun -n COUNT python",
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
        hosts="SLURM_JOB_NODELIST",
        job=_SLURM_JOB,
    ),
    Launcher(
        name="srun",
        start="srun --ntasks COUNT python",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        tasks_of_nodes="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        hosts="SLURM_STEP_NODELIST",
        job=_SLURM_JOB,
    ),
    Launcher(  # MPICH and Intel MPI
        name="mpirun",
        start="mpirun -n COUNT python",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        hosts="SLURM_JOB_NODELIST",
        job=_SLURM_JOB,
    ),
    Launcher(
        name="PMIx",
        start="prterun -n COUNT python",
        rank="PMIX_RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        hosts="SLURM_JOB_NODELIST",
        job=("PMIX_NAMESPACE",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """The place of a process among the ranks, and where the first rank listens.

    `local_rank` and `local_world_size` count the ranks of this machine only; `node` is the
    machine's index. `address` is "" if no variable names it.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    port: int


def own_place() -> ProcessPlace:
    """Return the place that this process's environment names."""
    return place_in(os.environ)


def has_one_device(place: ProcessPlace, variables: Mapping[str, str]) -> bool:
    """Whether this process may see only its own device, as srun or a wrapper of mpirun does."""
    are_limited = any(name in variables for name in _VISIBLE_DEVICES)
    return are_limited and place.launcher is not TORCHRUN


def place_in(variables: Mapping[str, str]) -> ProcessPlace:
    """Return the place that an environment names, or raise UnknownPlaceError.

    Without any launcher, this process is the first of WORLD_SIZE ranks, by default 1.
    """
    launcher = _launcher_in(variables)
    rank = _number(launcher.rank, variables, default=0)
    world_size = _number(launcher.world_size, variables, default=1)
    if launcher.world_size in variables and rank >= max(world_size, 1):
        raise UnknownPlaceError(
            f"{launcher.rank} is {rank}, and {launcher.world_size} is {world_size}",
            fix=f"start the script by {launcher.name} alone, without these variables",
        )
    local_rank, local_world_size = _local(launcher, variables, rank, world_size)
    nodes = _number(launcher.nodes, variables, default=-(-world_size // max(local_world_size, 1)))
    node = _number(launcher.node, variables, default=rank // max(local_world_size, 1))
    return ProcessPlace(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        nodes=nodes,
        address=_address(launcher, variables, is_one_node=local_world_size >= world_size),
        port=_number("MASTER_PORT", variables, default=_port(launcher, variables)),
    )


def _launcher_in(variables: Mapping[str, str]) -> Launcher:
    for one in LAUNCHERS:
        if one.rank in variables and one.world_size in variables:
            return one
    if "PMIX_RANK" in variables and TORCHRUN.rank not in variables:
        raise UnknownPlaceError(
            "PMIX_RANK is set, and no variable says how many ranks there are",
            fix="set WORLD_SIZE to the number of ranks, and MASTER_ADDR to the first one's host",
        )
    return TORCHRUN


def _local(
    launcher: Launcher, variables: Mapping[str, str], rank: int, world_size: int
) -> tuple[int, int]:
    """Return this process's local rank and local world size.

    Kubernetes sets no variables for them. Then each rank is assumed to be alone on its machine,
    unless the first rank's address is loopback: then all ranks are on one machine.
    """
    is_one_node = is_loopback(variables.get("MASTER_ADDR", ""))
    default_rank, default = (rank, world_size) if is_one_node else (0, 1)
    local_rank = _number(launcher.local_rank, variables, default=default_rank)
    if launcher.tasks_of_nodes in variables:
        tasks = _tasks(launcher.tasks_of_nodes, variables)
        node = _number(launcher.node, variables, default=0)
        default = tasks[node] if node < len(tasks) else default
    return local_rank, _number(launcher.local_world_size, variables, default=default)


def _number(name: str, variables: Mapping[str, str], *, default: int) -> int:
    """Return the whole number in a variable, or the default if it is not set."""
    text = variables.get(name) if name else None
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UnknownPlaceError(
            f"the environment variable {name} is {text!r}, which is no whole number",
            fix="torchrun, srun or mpirun sets it; without them, leave it unset",
        )
    return int(text)


_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


def _tasks(name: str, variables: Mapping[str, str]) -> list[int]:
    """Return the numbers of tasks of all nodes from Slurm's text: "4(x2),3" is 4, 4, 3."""
    found: list[int] = []
    for part in variables[name].split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise UnknownPlaceError(
                f"the environment variable {name} is {variables[name]!r}, which lists no tasks",
                fix="srun sets it; without srun, leave it unset",
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _address(launcher: Launcher, variables: Mapping[str, str], *, is_one_node: bool) -> str:
    """Return the host of the first rank, or "" if no variable names it."""
    if given := variables.get("MASTER_ADDR"):
        return given
    if is_one_node:
        return _LOCALHOST
    return first_host(variables.get(launcher.hosts, ""))


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: "gpu[01-04,7],big" begins with gpu01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None  # the pattern matches ""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _port(launcher: Launcher, variables: Mapping[str, str]) -> int:
    """Return a port: equal on all ranks of a start, and most likely another for another start."""
    words = [variables[name] for name in launcher.job if name in variables]
    if not words:
        return _USUAL_PORT
    return _PORTS[zlib.crc32(" ".join(words).encode()) % len(_PORTS)]


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A control group of this process: the memory that it may use, and how much of that is free."""

    limit_bytes: int
    free_bytes: int  # caches of files that can be dropped count as free


# For control groups of version 2, then of version 1: the kind of group, its files with the limit
# and with the used bytes, and the line of `memory.stat` with the bytes of cached files.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


_PROCESS, _CONTROL_GROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")


def memory_groups(proc: Path = _PROCESS, groups: Path = _CONTROL_GROUPS) -> Iterator[MemoryGroup]:
    """Yield the control groups that limit this process's memory, from the root down.

    A container or a job has less memory than its machine.
    """
    for kind, limit, used, dropped in _GROUPS:
        for folder in _folders(kind, proc, groups):
            with suppress(OSError, ValueError):  # no such file, or "max": no limit
                most = int((folder / limit).read_text(encoding="ascii"))
                yield MemoryGroup(
                    limit_bytes=most, free_bytes=most - _held_bytes(folder, used, dropped)
                )


def usable_cores(proc: Path = _PROCESS, groups: Path = _CONTROL_GROUPS) -> int:
    """Return how many cores this process may use; a container or job may not have all of them."""
    if hasattr(os, "sched_getaffinity"):
        every = len(os.sched_getaffinity(0))
    else:
        every = os.cpu_count() or 1
    return max(1, min([every, *map(int, _core_limits(proc, groups))]))


def _core_limits(proc: Path, groups: Path) -> Iterator[float]:
    """Yield the limits on cores from control groups of version 2, then of version 1."""
    for folder in _folders("", proc, groups):
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            yield int(quota) / int(period)
    for folder in _folders("cpu", proc, groups):
        with suppress(OSError, ValueError):
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (one.read_text(encoding="ascii") for one in files)
            if int(quota) > 0:  # -1: no limit
                yield int(quota) / int(period)


def _folders(kind: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups of a kind, from the root down.

    Version 1 has a tree of groups for each kind. Version 2 has one tree, whose kind is "".
    """
    with suppress(OSError):
        lines = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        for _, kinds, name in (line.split(":", 2) for line in lines):
            if kind in kinds.split(","):
                parts = filter(None, name.split("/"))
                yield from accumulate(parts, Path.joinpath, initial=groups / kind)


def _held_bytes(group: Path, used: str, dropped: str) -> int:
    """Return the used bytes of a group, without cached files; 0 if unknown."""
    with suppress(OSError, ValueError, KeyError):
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        statistics = dict(line.split() for line in lines)
        return int((group / used).read_text(encoding="ascii")) - int(statistics[dropped])
    return 0
