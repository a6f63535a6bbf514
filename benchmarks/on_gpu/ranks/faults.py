"""Tells what happens when a rank sleeps, fails, waits for its GPU, or is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.planner.costs.prediction import Zero
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.cases import Case, written
from benchmarks.on_gpu.report import Row

TABLE = "Ranks: what happens when a rank of two fails in step 4"
_CASE = Case(
    name="faults",
    pins={"data": 2, "microbatch": 2, "zero_levels": (Zero.OPTIMIZER,)},
)
_MOST_SECONDS = 100.0
_TOLD = ("error:", "fix:", "Error:", "kept step")  # lines with these are shown
_BEGUN = "step 4 begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What rank 1 does in step 4, and how the script is started and stopped."""

    name: str
    action: str  # of rank 1, see faulty_rank.py
    arguments: tuple[str, ...] = ()
    stops: bool = False  # torchrun gets SIGTERM then
    keeps: bool = False  # whether the script writes checkpoints


FAULTS = (
    Fault(name="sleeps for ever, --timeout 5", action="sleep", arguments=("--timeout", "5")),
    Fault(name="raises", action="raise"),
    Fault(name="is killed", action="kill"),
    Fault(name="none; SIGTERM, no checkpoints", action="none", stops=True),
    Fault(name="none; SIGTERM, with checkpoints", action="none", stops=True, keeps=True),
)
# They keep the GPU busy for a minute, so nothing else is measured meanwhile.
STUCK_FAULTS = (
    Fault(name="its GPU works for ever, --timeout 5", action="busy", arguments=("--timeout", "5")),
    Fault(
        name="its GPU works for ever; SIGTERM, with checkpoints",
        action="busy",
        stops=True,
        keeps=True,
    ),
)
TINY_FAULTS = (FAULTS[1],)


@dataclass(slots=True, kw_only=True)
class _Running:
    fault: Fault
    process: subprocess.Popen[str]
    log: Path
    failed_at: float | None = None
    ended_at: float | None = None


def fault_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each fault after which the device is free."""
    return _rows(context, TINY_FAULTS if context.tiny else FAULTS)


def stuck_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each fault that leaves the device busy."""
    return _rows(context, () if context.tiny else STUCK_FAULTS)


def _rows(context: Context, faults: Sequence[Fault]) -> Iterator[Row]:
    """Yield a row for each fault, as soon as it is over; all of them happen at once."""
    with TemporaryDirectory(prefix="on-gpu-") as folder:
        script = written(_CASE, folder).script
        running = [
            _started(fault, script, Path(folder) / f"{number}.log", context.device)
            for number, fault in enumerate(faults)
        ]
        for one in _ended(running, min(_MOST_SECONDS, context.seconds_left)):
            yield _row(one)


def _started(fault: Fault, script: str, log: Path, device: str) -> _Running:
    arguments = ["--steps", "1000000", "--data", "synthetic", "--log-every", "1000"]
    arguments += ["--checkpoint", str(log.with_suffix(""))] if fault.keeps else []
    module = ["-m", "benchmarks.on_gpu.ranks.faulty_rank", script, device, fault.action]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *torchrun, *module, *arguments, *fault.arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            text=True,
            start_new_session=True,
        )
    return _Running(fault=fault, process=process, log=log)


def _ended(running: Sequence[_Running], seconds: float) -> Iterator[_Running]:
    """Yield each run when it has ended; send signals when they are due, and kill late runs."""
    deadline = time.monotonic() + seconds
    try:
        while any(one.ended_at is None for one in running) and time.monotonic() < deadline:
            time.sleep(0.1)
            for one in running:
                if one.ended_at is None:
                    _look(one)
                    if one.ended_at is not None:
                        yield one
    finally:
        late = [one for one in running if one.ended_at is None]
        for one in late:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
    yield from late


def _look(one: _Running) -> None:
    if one.process.poll() is not None:
        one.ended_at = time.monotonic()
    if one.failed_at is None and _BEGUN in one.log.read_text():
        one.failed_at = time.monotonic()
        if one.fault.stops:
            time.sleep(0.5)
            one.process.send_signal(signal.SIGTERM)


def _row(one: _Running) -> Row:
    lines = one.log.read_text().splitlines()
    told = [line for line in lines if any(word in line for word in _TOLD)]
    seconds = None
    if one.ended_at is not None and one.failed_at is not None:
        seconds = one.ended_at - one.failed_at
    return Row(
        table=TABLE,
        cells={
            "rank 1": one.fault.name,
            "exit code": one.process.returncode if one.ended_at else "none: was killed here",
            "seconds until the end": seconds,
            "message": " ⏎ ".join(dict.fromkeys(told or lines[-3:]))[:600],
            "kept": _kept(one),
        },
    )


def _kept(one: _Running) -> str:
    folder = one.log.with_suffix("")
    return ", ".join(sorted(path.name for path in folder.glob("step-*"))) if one.fault.keeps else ""
