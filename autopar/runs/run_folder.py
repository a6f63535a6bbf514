"""Turns a plan and options into the folder of a run and the torchrun command."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from autopar.console import print_note
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.files import refuse_in_checkpoint, write_whole
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.plan import StoredPlan
from autopar.runs.run_record import METRICS, PRIVATE, RECORD, RunState, read_record, runs_in
from autopar.runtime.checkpointing.claim import NAME as IN_USE
from autopar.runtime.checkpointing.claim import TakenError, claim
from autopar.runtime.checkpointing.finding import (
    AUTO,
    NEVER,
    begin,
    checkpoints_in,
    is_of_checkpoint,
    is_step,
    step_folder,
)
from autopar.runtime.checkpointing.manifest import NAME as MANIFEST
from autopar.runtime.checkpointing.manifest import read_moment
from autopar.runtime.ranks.locations import Location, located, location, put, write
from autopar.runtime.ranks.options import OPTIONS, OptionParser, read_options
from autopar.runtime.texts import masked, masked_variable

RUNS, CHECKPOINTS, LOGS = "runs", "checkpoints", "logs"
_EXPORT = "model.safetensors"
_OF_A_NODE = re.compile(r"node-\d+\.json")
_PRIVATE_FOLDER = 0o700
_COPIED_BYTES = 2**24  # per read
_PACKAGES = ("autopar", "torch", "numpy", "safetensors", "transformers", "triton")
_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "SLURM_JOB", "MKL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and the index of this one."""

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run writes its checkpoints, and the place from which it resumes."""

    checkpoints: Location  # a run that goes on from a folder of checkpoints writes there, too
    goes_on_from: Location | None = None  # a run, a folder of checkpoints, or a checkpoint
    copied: Location | None = None  # a checkpoint to copy into the run's own folder


def run_name(plan: StoredPlan, runs: Path, given: str | None) -> str:
    """Return the name of a run's folder: the given one, or time and model."""
    if given is not None:
        if not re.fullmatch(r"[\w.-]+", given) or given in (".", ".."):
            raise InputError(f"{given!r} is no name of a folder", where="--name")
        return given
    model = re.sub(r"[^\w.-]+", "-", plan.model.name).strip("-") or "model"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    taken = sum(1 for one in runs.glob(f"{name}*")) if runs.is_dir() else 0
    return f"{name}-{taken + 1}" if taken else name


def refuse_foreign(folder: Path) -> None:
    """Reject a folder that is neither empty nor that of a run."""
    refuse_in_checkpoint(folder)
    names = {one.name for one in folder.iterdir()} - {IN_USE} if folder.is_dir() else set()
    if not names and (folder.is_dir() or not os.path.lexists(folder)):
        return
    records = [name for name in names if name == RECORD or _OF_A_NODE.fullmatch(name)]
    if not any(read_record(folder, name=name) is not None for name in records):
        raise InputError(
            f"{folder} is there, and is no folder of a run: nothing is written into it",
            fix="give another --name, or another --runs",
        )


def start_of(plan: StoredPlan, runs: Path, folder: Path, resume: str | None, nodes: Nodes) -> Start:
    """Return where a run writes its checkpoints, and the place from which it resumes."""
    own = folder / CHECKPOINTS
    is_taken = bool(checkpoints_in(own))
    if nodes.rank == 0:
        _refuse_running(folder, "give another --name")
    if resume == NEVER and is_taken:
        raise InputError(
            f"the run {folder.name} has checkpoints, which are not written over",
            fix="give another --name, or, to go on from them, drop `--resume never`",
        )
    if is_taken and resume in (None, AUTO):
        return Start(checkpoints=own, goes_on_from=folder)
    if resume in (None, NEVER) or (resume == AUTO and nodes.count > 1):
        return Start(checkpoints=own)  # several machines might find different runs
    if resume == AUTO:
        return _newest(plan, runs, own)
    return _named(location(resume).resolve(), own)


def _refuse_running(folder: Path, otherwise: str) -> None:
    record = read_record(folder)
    if record is not None and record.state is RunState.RUNNING:
        raise AutoparError(
            f"the run {folder.name} is still running (process {record.process} on {record.host})",
            fix=f"wait until it ends, or {otherwise}",
            exit_code=ExitCode.MISMATCH,
        )


def _newest(plan: StoredPlan, runs: Path, own: Path) -> Start:
    """Resume from the newest run of the same model that has checkpoints."""
    for path, record in reversed(runs_in(runs)):
        is_same = (record.model, record.arguments) == (plan.model.spec, plan.model.arguments)
        place = record.checkpoints_in(path) if is_same else None
        if place is not None and checkpoints_in(place):
            _refuse_running(path, "leave --resume out")
            return Start(checkpoints=place, goes_on_from=path)
    return Start(checkpoints=own)


def _named(path: Location, own: Path) -> Start:
    if (path / MANIFEST).is_file():
        return Start(checkpoints=own, goes_on_from=path, copied=path)
    place = path
    if isinstance(path, Path) and (record := read_record(path)) is not None:
        _refuse_running(path, "leave --resume out")
        place = record.checkpoints_in(path) or path
    if not checkpoints_in(place):
        raise InputError(
            f"there are no checkpoints in {place}",
            where="--resume",
            expected="auto, never, the folder of a run, a folder of checkpoints, or one of them",
        )
    return Start(checkpoints=place, goes_on_from=path)


@contextmanager
def own_folder(folder: Path, nodes: Nodes) -> Iterator[None]:
    """Create a run's folder, and claim it while the code inside runs.

    Of several machines, the first one claims the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = claim(folder, note=print_note) if nodes.rank == 0 else None
    except TakenError as error:
        raise AutoparError(
            f"the run {folder.name} is still running ({error.holder})",
            fix="wait until it ends, or give another --name",
            exit_code=ExitCode.MISMATCH,
        ) from None
    except OSError as error:
        raise InputError(
            f"nothing can be written to {folder}: {error.strerror}", fix="choose another --runs"
        ) from None
    try:
        yield
    finally:
        if own is not None:
            own.release()


def copy_checkpoint(checkpoint: Location, to: Location) -> None:
    """Copy a checkpoint into a run's folder, with hard links if possible.

    The run may delete its copy later without touching the earlier training's checkpoint. When the
    run is restarted, it looks for checkpoints in its own folder only, so the copy must be there.
    """
    name = checkpoint.name
    place = to / name if is_step(name) else step_folder(to, read_moment(checkpoint).step)
    if place.exists():
        return
    fresh = begin(place)
    for one in located(checkpoint, "*"):
        if not is_of_checkpoint(one.name):
            continue
        try:
            os.link(str(one), str(fresh / one.name))
        except OSError:  # another disk, or a store
            with one.open("rb") as file:
                write(fresh / one.name, iter(partial(file.read, _COPIED_BYTES), b""))
    put(fresh, place)


def script_arguments(
    settings: Mapping[str, Any], folder: Path, start: Start, given: Sequence[str]
) -> tuple[str, ...]:
    """Return the script's arguments: places for the files that it writes, and then `given`.

    The files are checkpoints, the export and the metrics. If the script or `given` names a place
    for one of them, no other place is added.
    """
    own: list[str] = []
    if keeps_in_run(settings, given):
        own += ["--checkpoint", str(start.checkpoints), "--resume", AUTO]
    if settings.get("EXPORT", _EXPORT) == _EXPORT and not _is_given("--export", given):
        own += ["--export", str(folder / _EXPORT)]
    if not _is_given("--metrics", given):
        own += ["--metrics", str(folder / METRICS)]
    return (*own, *given)


def keeps_in_run(settings: Mapping[str, Any], given: Sequence[str]) -> bool:
    """Whether neither the script nor the arguments name a folder of checkpoints."""
    is_set = settings.get("CHECKPOINT", "none") != "none"
    return not is_set and not _is_given("--checkpoint", given)


def _is_given(option: str, given: Sequence[str]) -> bool:
    """Whether an option is among a script's arguments, perhaps without its value."""
    return any(one.partition("=")[0] == option for one in given)


def value_given(option: str, given: Sequence[str]) -> str | None:
    """Return the last value of an option among a script's arguments."""
    found = None
    for number, one in enumerate(given):
        if one.startswith(f"{option}="):
            found = one.partition("=")[2]
        elif one == option and number + 1 < len(given):
            found = given[number + 1]
    return found


def settings_in(script: str) -> dict[str, Any]:
    """Return the constants that a script sets to literals."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(script).body
    except SyntaxError:  # the ranks will report it
        return found
    for one in statements:
        if isinstance(one, ast.Assign):
            names = [target.id for target in one.targets if isinstance(target, ast.Name)]
            with suppress(ValueError):
                found |= dict.fromkeys(names, ast.literal_eval(one.value))
    return found


class _OptionCheck(OptionParser):
    """Parses the options of a script on a machine that perhaps does not train."""

    def add_argument(self, *flags: Any, **how: Any) -> Any:
        """Add an option; a value that depends on the machine that trains is not checked."""
        own = {"type": str} if flags[0] in ("--weights", "--workers") else {}
        return super().add_argument(*flags, **{**how, **own})

    def error(self, message: str) -> NoReturn:
        """Raise, where a script leaves."""
        raise InputError(
            message, where="the options after --", fix="autopar run PLAN -- --help lists them"
        )


def refuse_wrong_options(script: str, given: Sequence[str]) -> None:
    """Raise for options that a script will refuse; the text is the script's.

    A script that was changed to read its options in another way is not asked.
    """
    settings = settings_in(script)
    needed = {one.setting for one in OPTIONS if one.setting and one.needs in ("", *settings)}
    if _READING in script and needed <= settings.keys():
        read_options(given, settings, _OptionCheck())


_READING = "read_options(argv, globals())"  # in main of a script


def torchrun_arguments(
    script: Path,
    folder: Path,
    *,
    processes: int,
    nodes: Nodes,
    max_restarts: int,
    arguments: Sequence[str],
) -> list[str]:
    """Return torchrun's arguments; each rank's output goes to the console and to a file."""
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
    """Write this machine's environment to a run's folder; the first also writes plan and script."""
    suffix = f"-node-{nodes.rank}" if nodes.rank else ""
    text = masked(json.dumps(surroundings(command), indent=2)) + "\n"
    place = folder / f"environment{suffix}.json"
    write_whole(place, text, what="the environment of the run", mode=PRIVATE)
    (folder / LOGS).mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
    if nodes.rank == 0:
        for one, name in ((plan, PLAN_NAME), (script, script.name)):
            # a plan made for this run is already there
            if one.resolve() != (folder / name).resolve():
                shutil.copy2(one, folder / name)
                text = (folder / name).read_text(encoding="utf-8", errors="replace")
                if masked(text) != text:  # a setting of the script contains a password
                    (folder / name).chmod(PRIVATE)


def surroundings(command: str) -> dict[str, Any]:
    """Return facts on a run that its files do not contain: machine, versions, variables."""
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
            name: masked_variable(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """Return this machine's GPUs with memory and driver. Asking torch would use memory on each."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
