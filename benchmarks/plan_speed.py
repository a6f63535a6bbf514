"""Measures the seconds and the memory of `autopar plan`, from a cold start, on models of all sizes.

    python benchmarks/plan_speed.py [gpt2-8 llama8b-64 … chain-1000] [-o FILE]
    python benchmarks/plan_speed.py --scaling [-o FILE]

Every case runs in a process of its own with an empty cache: imports, trace, search, plan.json and
train.py. The table has wall time, and processor time, which a busy machine hardly changes. The gap
is the share of the step by which another plan may still be faster than the one found. `--scaling`
measures and draws one model on ever more devices, and an ever longer chain of layers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.planner.plan.files.cache import PLACE

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "plan_speed.md"
SCALED = RESULT.with_name("plan_scaling.md")
MOST_BYTES = int(1.5 * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on some devices, and how long its plan may take."""

    name: str
    model: str  # its file
    arguments: tuple[str, ...]
    gpus: int
    global_batch: int | None  # None: the default
    most_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The time and memory that a case took."""

    case: Case
    wall_seconds: float
    processor_seconds: float
    peak_bytes: int
    gap: float  # the share of the step by which another plan may still be faster
    fault: str  # the end of its output, if it failed

    @property
    def is_within(self) -> bool:
        """Whether it succeeded, within its limits of time and memory."""
        is_fast = self.wall_seconds <= self.case.most_seconds
        return not self.fault and is_fast and self.peak_bytes <= MOST_BYTES


CASES = (
    Case(
        name="gpt2-8",
        model="models_zoo/gpt2.py",
        arguments=("size=124m",),
        gpus=8,
        global_batch=64,
        most_seconds=8.0,
    ),
    Case(
        name="llama8b-64",
        model="models_zoo/llama.py",
        arguments=("size=8b",),
        gpus=64,
        global_batch=512,
        most_seconds=12.0,
    ),
    Case(
        name="llama70b-512",
        model="models_zoo/llama.py",
        arguments=("size=70b",),
        gpus=512,
        global_batch=2048,
        most_seconds=25.0,
    ),
    Case(
        name="llama405b-16384",
        model="models_zoo/llama.py",
        arguments=("size=405b",),
        gpus=16384,
        global_batch=16384,
        most_seconds=45.0,
    ),
    Case(
        name="chain-250",
        model="benchmarks/chain.py",
        arguments=("layers=250",),
        gpus=2,
        global_batch=16,
        most_seconds=7.0,
    ),
    Case(
        name="chain-1000",
        model="benchmarks/chain.py",
        arguments=("layers=1000",),
        gpus=2,
        global_batch=16,
        most_seconds=12.0,
    ),
)

DEVICES = (8, 64, 512, 4_096, 16_384, 65_536)
LAYERS = (125, 250, 500, 1_000, 2_000)
SCALING = (
    *(
        Case(
            name=f"llama8b-{gpus}",
            model="models_zoo/llama.py",
            arguments=("size=8b",),
            gpus=gpus,
            global_batch=None,
            most_seconds=15.0,
        )
        for gpus in DEVICES
    ),
    *(
        Case(
            name=f"chain-{layers}",
            model="benchmarks/chain.py",
            arguments=(f"layers={layers}",),
            gpus=2,
            global_batch=16,
            most_seconds=6.0 + layers / 125,
        )
        for layers in LAYERS
    ),
)


def measured(case: Case) -> Taken:
    """Plan a case in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "autopar", "plan", str(ROOT / case.model),
            *(part for one in case.arguments for part in ("--arg", one)), "--gpus", str(case.gpus),
            *(("--global-batch", str(case.global_batch)) if case.global_batch else ()),
            "--no-verify", "-o", folder,
        ]  # fmt: skip
        output = Path(folder) / "output.txt"
        began = time.perf_counter()
        with output.open("w") as said:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, PLACE: str(Path(folder) / "cache")},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)  # Popen need not wait again
        failed = process.returncode != 0
        return Taken(
            case=case,
            wall_seconds=wall,
            processor_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
            gap=math.nan if failed else proved_gap(Path(folder)),
            fault=output.read_text()[-500:] if failed else "",
        )


def proved_gap(folder: Path) -> float:
    """Return the share of the step by which another plan may still be faster."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return float(plan["proof"]["gap"])


def table(rows: Iterable[Taken]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| case | wall s | at most | processor s | peak GiB | at most | gap | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        verdict = "ok" if row.is_within else "failed" if row.fault else "over"
        lines.append(
            f"| {row.case.name} | {row.wall_seconds:.1f} | {row.case.most_seconds:.0f} "
            f"| {row.processor_seconds:.1f} | {row.peak_bytes / 2**30:.2f} "
            f"| {MOST_BYTES / 2**30:.1f} | {row.gap:.1%} | {verdict} |"
        )
    return "\n".join(lines)


def page(rows: Sequence[Taken]) -> str:
    """Return the whole page."""
    load = os.getloadavg()[0]
    return (
        "# How long `autopar plan` takes\n\n"
        "Cold start to written script, remade by `python benchmarks/plan_speed.py`.\n"
        f"{os.cpu_count()} processors; load when done: {load:.1f}.\n\n{table(rows)}\n"
    )


def scaling_page(rows: Sequence[Taken], picture: Path) -> str:
    """Return the page about ever more devices and layers."""
    many, long = rows[: len(DEVICES)], rows[len(DEVICES) :]
    return (
        "# How long `autopar plan` takes with more devices and more layers\n\n"
        "Remade by `python benchmarks/plan_speed.py --scaling`, from a cold start.\n"
        f"{os.cpu_count()} processors; load when done: {os.getloadavg()[0]:.1f}.\n\n"
        f"![seconds by devices and by layers]({picture.name})\n\n"
        f"## Llama 8B on 8 to 65,536 devices, the default batch\n\n{table(many)}\n\n"
        f"## A chain of 125 to 2,000 linear layers on 2 devices\n\n{table(long)}\n"
    )


def draw(rows: Sequence[Taken], path: Path) -> None:
    """Draw the processor's seconds by devices and by layers."""
    import matplotlib as mpl  # only this picture needs it

    mpl.use("Agg")  # a picture in a file, no window
    from matplotlib import pyplot as plt

    figure, (many, long) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    seconds = [one.processor_seconds for one in rows]
    many.plot(DEVICES, seconds[: len(DEVICES)], marker="o")
    many.set(xscale="log", xlabel="devices", ylabel="processor seconds", ylim=(0, None))
    many.set_title("Llama 8B")
    long.plot(LAYERS, seconds[len(DEVICES) :], marker="o")
    long.set(xlabel="layers", xlim=(0, None), ylim=(0, None), title="a chain on 2 devices")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named cases, or all if none is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument("--scaling", action="store_true", help="more devices, and more layers")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.cases) - set(names))
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    rows = []
    chosen = [case for case in CASES if case.name in (given.cases or names)]
    for case in SCALING if given.scaling else chosen:
        rows.append(measured(case))
        print(table(rows[-1:]).splitlines()[-1], rows[-1].fault, flush=True)
    output = given.output or (SCALED if given.scaling else RESULT)
    output.parent.mkdir(parents=True, exist_ok=True)
    picture = output.with_suffix(".png")
    if given.scaling:
        draw(rows, picture)
    output.write_text(
        scaling_page(rows, picture) if given.scaling else page(rows), encoding="utf-8"
    )
    return 0 if all(row.is_within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
