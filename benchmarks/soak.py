"""Trains under faults, and compares the weights with those of a training without faults.

    python -m benchmarks.soak [--minutes 15] [--every 20] [--seed 0]

A tiny GPT-2 trains on two ranks of this machine, under `autopar run --resume auto`. `--every`
seconds after each (re)start a fault strikes: a rank or torchrun is killed with -9, the run gets
SIGTERM, or a rank is stopped (SIGSTOP). A run that has ended is started again. When the time is
over, the last steps are trained undisturbed. The weights must then equal, bit by bit, those of one
undisturbed training of as many steps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from autopar.runs.run_metrics import lines_of
from autopar.runtime.ranks.metrics import Event

MODEL = Path(__file__).parents[1] / "models_zoo" / "gpt2.py"
PLAN = "--arg size=tiny --gpus 2 --device cpu --global-batch 8 --precision fp32"
FAULTS = ("a rank is killed", "torchrun is killed", "SIGTERM", "a rank is stopped")
ENDLESS, LAST_STEPS = 10**9, 20
OWN = ("--checkpoint-every", "20", "--log-every", "1", "--timeout", "5")
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE_SECONDS = 300


class Soak:
    """A training in a folder, and the job that trains there now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._job: subprocess.Popen[bytes] | None = None

    def job(self) -> subprocess.Popen[bytes]:
        """Return the job that trains, started again if it has ended."""
        if self._job is None or self._job.poll() is not None:
            goes_on = ("--max-restarts", "1000", "--resume", "auto")
            self._job = self.train(ENDLESS, "none", *goes_on)
        return self._job

    def train(self, steps: int, export: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a run."""
        command = [sys.executable, "-m", "autopar", "run", str(self.folder), *words, "--", *OWN]
        with (self.folder / "printed").open("ab") as printed:
            return subprocess.Popen(
                [*command, "--steps", str(steps), "--export", export],
                stdout=printed,
                stderr=printed,
                env=os.environ | VARIABLES,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics of all runs, in the order of their times."""
        files = self.folder.glob("runs/*/metrics.jsonl")
        return sorted((line for one in files for line in lines_of(one)), key=itemgetter("time"))

    def wait_for_start(self, number: int) -> None:
        """Wait until the training has started `number` times."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(starts(self.lines())) < number:
            self.job()
            time.sleep(0.5)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it does not start again: {self.folder / 'printed'}")

    def strike(self, fault: str) -> None:
        """Let a fault happen to the job."""
        job = self.job()
        (torchrun,) = children(job.pid)
        victims = {"torchrun is killed": torchrun, "SIGTERM": job.pid}
        signals = {"SIGTERM": signal.SIGTERM, "a rank is stopped": signal.SIGSTOP}
        victim = victims.get(fault) or random.choice(children(torchrun))
        os.kill(victim, signals.get(fault, signal.SIGKILL))

    def end(self) -> int:
        """Stop the training, and return the last step that is kept."""
        job = self.job()
        job.terminate()
        job.wait(PATIENCE_SECONDS)
        return max(int(one["step"]) for one in self.lines() if one.get("event") == Event.KEPT)


def children(process: int) -> list[int]:
    """Return the processes that one has started."""
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def starts(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return, for each start of the training, the step after which it started."""
    return [int(one["step"]) for one in lines if one.get("event") == Event.STARTED]


def steps_lost(lines: Sequence[dict[str, Any]]) -> int:
    """Return how many steps were trained more than once."""
    lost = last = 0
    for one in lines:
        if one.get("event") == Event.STARTED:
            lost += max(last - int(one["step"]), 0)
        elif "loss" in one:
            last = int(one["step"])
    return lost


def main() -> int:
    """Train under faults, compare, print; return 1 if the weights differ."""
    options = _options()
    random.seed(options.seed)
    with TemporaryDirectory() as folder:
        soak, faults = Soak(Path(folder)), Counter[str]()
        planned = [sys.executable, "-m", "autopar", "plan", str(MODEL), *PLAN.split(), "-o", folder]
        subprocess.run(planned, check=True, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            soak.wait_for_start(1 + faults.total())
            time.sleep(options.every)
            fault = random.choice(FAULTS)
            soak.strike(fault)
            faults[fault] += 1
            print(f"after step {_last_step(soak.lines()):,}: {fault}", flush=True)
        soak.wait_for_start(1 + faults.total())
        steps = soak.end() + LAST_STEPS
        lines = soak.lines()
        files = [str(soak.folder / f"{name}.safetensors") for name in ("soaked", "calm")]
        for file, words in zip(files, (("--resume", "auto"), ()), strict=True):
            soak.train(steps, file, *words).wait()
        soaked, calm = map(load_file, files)
    is_same = all(torch.equal(soaked[name], value) for name, value in calm.items())
    told = ", ".join(f"{fault} {count}×" for fault, count in faults.most_common())
    print(f"{faults.total()} faults: {told}")
    print(f"{len(starts(lines)) - 1} restarts, {steps_lost(lines):,} steps trained twice")
    print(f"after {steps:,} steps the weights are {'the same' if is_same else 'OTHERS'}")
    return 0 if is_same else 1


def _last_step(lines: Sequence[dict[str, Any]]) -> int:
    return max((int(one["step"]) for one in lines if "loss" in one), default=0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--every", type=float, default=20, help="seconds from a start to a fault")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
