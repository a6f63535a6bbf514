"""Turns a plan and its options into the folder of a run, and into the command that trains there."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.planner.destination import write_whole
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.plan import Plan
from autopar.runs.run_record import METRICS, read_record, runs_in
from autopar.runtime.keeping.finding import AUTO, NEVER
from autopar.runtime.keeping.manifest import NAME as MANIFEST
from autopar.runtime.keeping.step_folders import checkpoints_in
from autopar.runtime.ranks.locations import Location, location, put, remove_tree, write

RUNS, CHECKPOINTS, LOGS = "runs", "checkpoints", "logs"
_EXPORT = "model.safetensors"
_COPIED_BYTES = 2**24  # at once
_PACKAGES = ("autopar", "torch", "numpy", "safetensors", "transformers", "triton")
_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "SLURM_JOB", "MKL_")


class RunningError(AutoparError):
    """A run that still trains, into whose checkpoints another one would write."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a run begins: in its own checkpoints, those of an earlier run, or a copy of one."""

    checkpoints: Location
    goes_on_from: Location | None = None  # a run, a folder of checkpoints, or one of them
    copied: Location | None = None  # a checkpoint that the run's own folder gets first


def run_name(plan: Plan, runs: Path, given: str | None) -> str:
    """Return the name of a run's folder: that which is given, or time and model."""
    if given is not None:
        if not re.fullmatch(r"[\w.-]+", given) or given in (".", ".."):
            raise InputError(f"{given!r} is no name of a folder", where="--name")
        return given
    model = re.sub(r"[^\w.-]+", "-", plan.model.name).strip("-") or "model"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    taken = sum(1 for one in runs.glob(f"{name}*")) if runs.is_dir() else 0
    return f"{name}-{taken + 1}" if taken else name


def start_of(plan: Plan, runs: Path, folder: Path, resume: str | None, nodes: Nodes) -> Start:
    """Return where a run's checkpoints are, and what it goes on from."""
    own = folder / CHECKPOINTS
    is_taken = bool(checkpoints_in(own))
    if nodes.rank == 0:
        _refuse_running(folder)
    if resume == NEVER and is_taken:
        raise InputError(
            f"the run {folder.name} has checkpoints, which are not written over",
            fix="give another --name, or leave --resume never out to go on",
        )
    if is_taken and resume in (None, AUTO):
        return Start(checkpoints=own, goes_on_from=folder)
    if resume in (None, NEVER) or (resume == AUTO and nodes.count > 1):
        return Start(checkpoints=own)  # nodes could not agree on a run that each of them looks for
    if resume == AUTO:
        return _newest(plan, runs, own)
    return _named(location(resume).resolve(), own)


def _refuse_running(folder: Path) -> None:
    record = read_record(folder)
    if record is not None and record.is_running:
        raise RunningError(
            f"the run {folder.name} is still running (process {record.process} on {record.host})",
            fix="wait until it ends, or give another --name",
        )


def _newest(plan: Plan, runs: Path, own: Path) -> Start:
    """Go on from the newest run of the same model that has kept something."""
    for path, record in reversed(runs_in(runs)):
        is_same = (record.model, record.arguments) == (plan.model.spec, plan.model.arguments)
        place = location(record.checkpoints) if record.checkpoints else None
        if is_same and place is not None and checkpoints_in(place):
            _refuse_running(path)
            return Start(checkpoints=place, goes_on_from=path)
    return Start(checkpoints=own)


def _named(path: Location, own: Path) -> Start:
    if (path / MANIFEST).is_file():
        return Start(checkpoints=own, goes_on_from=path, copied=path)
    record = read_record(path) if isinstance(path, Path) else None
    if record is not None and isinstance(path, Path):
        _refuse_running(path)
    place = location(record.checkpoints) if record is not None and record.checkpoints else path
    if not checkpoints_in(place):
        raise InputError(
            f"there are no checkpoints in {place}",
            where="--resume",
            expected="auto, never, the folder of a run, a folder of checkpoints, or one of them",
        )
    return Start(checkpoints=place, goes_on_from=path)


def copy_checkpoint(checkpoint: Location, to: Location) -> None:
    """Put a checkpoint into the folder of a run, which may let go of it later: by links, if it can.

    So the earlier training keeps its own, and a restart finds what this one has written since.
    """
    place = to / checkpoint.name
    if place.exists():
        return
    fresh = place.with_name(place.name + ".tmp")
    remove_tree(fresh)
    fresh.mkdir(parents=True)
    for one in checkpoint.iterdir():
        try:
            os.link(str(one), str(fresh / one.name))
        except OSError:  # another disk, or a store
            with one.open("rb") as file:
                write(fresh / one.name, iter(partial(file.read, _COPIED_BYTES), b""))
    put(fresh, place)


def script_arguments(
    script: Path, folder: Path, start: Start, given: Sequence[str]
) -> tuple[str, ...]:
    """Return what the script is told: places in the run's folder if it has no others, and ARGS."""
    settings = settings_in(script.read_text(encoding="utf-8"))
    own: list[str] = []
    if keeps_in_run(settings, given):
        own += ["--checkpoint", str(start.checkpoints), "--resume", AUTO]
    if settings.get("EXPORT", _EXPORT) == _EXPORT and not is_given("--export", given):
        own += ["--export", str(folder / _EXPORT)]
    if not is_given("--metrics", given):
        own += ["--metrics", str(folder / METRICS)]
    return (*own, *given)


def keeps_in_run(settings: Mapping[str, Any], given: Sequence[str]) -> bool:
    """Whether neither script nor arguments say where checkpoints go."""
    is_set = settings.get("CHECKPOINT", "none") != "none"
    return not is_set and not is_given("--checkpoint", given)


def is_given(option: str, given: Sequence[str]) -> bool:
    """Whether an option is among the arguments of a script."""
    return any(one == option or one.startswith(f"{option}=") for one in given)


def value_given(option: str, given: Sequence[str]) -> str | None:
    """Return the last value of an option among the arguments of a script."""
    found = None
    for number, one in enumerate(given):
        if one.startswith(f"{option}="):
            found = one.partition("=")[2]
        elif one == option and number + 1 < len(given):
            found = given[number + 1]
    return found


def settings_in(script: str) -> dict[str, Any]:
    """Return the constants that a script sets to plain values."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(script).body
    except SyntaxError:  # which torchrun's ranks will tell
        return found
    for one in statements:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant):
            names = [target.id for target in one.targets if isinstance(target, ast.Name)]
            found |= dict.fromkeys(names, one.value.value)
    return found


def torchrun_arguments(
    script: Path,
    folder: Path,
    *,
    processes: int,
    nodes: Nodes,
    max_restarts: int,
    arguments: Sequence[str],
) -> list[str]:
    """Return what torchrun is told; each rank's lines go to the console and to a file."""
    where = ["--standalone"]
    if nodes.count > 1:
        where = ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        where += ["--master-addr", str(nodes.address), "--master-port", str(nodes.port)]
    return [
        *where,
        *("--nproc-per-node", str(processes // nodes.count)),
        *(("--max-restarts", str(max_restarts)) if max_restarts else ()),
        *("--log-dir", str(folder / LOGS), "--tee", "3"),
        str(script),
        *arguments,
    ]


def fill_folder(folder: Path, plan: Path, script: Path, nodes: Nodes, command: str) -> None:
    """Leave plan, script and surroundings in the folder of a run."""
    suffix = f"-node-{nodes.rank}" if nodes.rank else ""
    text = json.dumps(surroundings(command), indent=2) + "\n"
    write_whole(folder / f"environment{suffix}.json", text, what="the environment of the run")
    if nodes.rank == 0:
        for one, name in ((plan, PLAN_NAME), (script, script.name)):
            if one.resolve() != (folder / name).resolve():  # a plan that was made for this run
                shutil.copy2(one, folder / name)


def surroundings(command: str) -> dict[str, Any]:
    """Return what a run depends on and its folder has no copy of."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {
        "command": command,
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: found for name, found in packages.items() if found},
        "processors": os.cpu_count(),
        "devices": _devices(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """Return the GPUs of this machine with memory and driver; torch would take memory on each."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
