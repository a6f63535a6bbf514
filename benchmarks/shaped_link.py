"""Compares predicted with measured steps on two nodes whose link is made slow.

    python -m benchmarks.shaped_link [--rates 100 400] [--steps 8] [-o FILE]

Two network namespaces of this machine are the nodes (root only); `tc` shapes both ends of the cable
between them. A GPT-2 is planned for two CPU processes and a network of that rate, with profiled
ops, and trained by one torchrun on each node.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from autopar.planner.plan.files.document import read_plan
from tests.codegen.two_nodes import CABLE, PLACE, start_on, two_nodes, why_not

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "shaped_link.md"
ARGUMENTS = ("dim=256", "layers=4", "seq_len=128", "dropout=0.0")
GPT2 = str(ROOT / "models_zoo" / "gpt2.py")
MODEL = (GPT2, *(word for one in ARGUMENTS for word in ("--arg", one)))
KINDS = ("dp=2", "dp=2,zero=3", "pp=2,microbatch=2,schedule=1f1b")
CLUSTER = """
[[nodes]]
count = 2
device = "cpu"
devices = 1

[network]
bandwidth = "{rate} Mb/s"
cards_per_node = 1
latency = "50 us"
topology = "switch"
efficiency = 0.95
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan on a link: what its step was predicted to take, and what it took."""

    rate: int  # Mbit/s
    kind: str
    predicted_seconds: float
    measured_seconds: float

    def __str__(self) -> str:
        error = self.predicted_seconds / self.measured_seconds - 1
        times = f"{self.measured_seconds * 1e3:,.0f} ms | {self.predicted_seconds * 1e3:,.0f} ms"
        return f"| {self.rate} Mbit/s | {self.kind} | {times} | {error:+.1%} |"


def autopar(*words: str) -> None:
    """Run a command of autopar; if it fails, exit with its output."""
    command = [sys.executable, "-m", "autopar", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def shape(node: str, rate: int) -> None:
    """Limit what a node sends to `rate` Mbit/s."""
    queue = ("tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms")
    words = ["ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", CABLE, "root", *queue]
    subprocess.run(words, check=True)


def rows(rates: Sequence[int], steps: int) -> Iterator[Row]:
    """Plan and train with each kind of plan on each link."""
    with TemporaryDirectory(prefix="shaped-link-") as folder:
        place = Path(folder)
        profiled = ("--batch", "2", "--batch", "4", "--precision", "fp32", "--budget", "30")
        autopar("profile", *MODEL, *profiled, "-o", str(place / "measured.toml"))
        for rate in rates:
            cluster = place / f"{rate}.toml"
            cluster.write_text(CLUSTER.format(rate=rate), encoding="utf-8")
            for kind in KINDS:
                out = place / f"{rate}-{kind}"
                autopar(
                    "plan", *MODEL, "--cluster", str(cluster), "--precision", "fp32",
                    "--global-batch", "8", "--pin", kind, "--profile", str(place / "measured.toml"),
                    "-o", str(out),
                )  # fmt: skip
                yield Row(
                    rate=rate,
                    kind=kind,
                    predicted_seconds=read_plan(out).prediction.step_seconds,
                    measured_seconds=_measured(out, rate, steps),
                )


def _measured(out: Path, rate: int, steps: int) -> float:
    """Train, and return the median seconds of all steps but the first two."""
    script = ("-m", "torch.distributed.run", *PLACE, "--nproc-per-node", "1", str(out / "train.py"))
    own = ("--steps", str(steps), "--log-every", "1", "--json", "--export", "none")
    with two_nodes() as nodes:
        for node in nodes:
            shape(node, rate)
        jobs = start_on(nodes, out, *script, *own)
        printed, errors = zip(*(job.communicate(timeout=600) for job in jobs), strict=True)
    if any(job.returncode for job in jobs):
        raise SystemExit("\n".join(errors))
    lines = [json.loads(line) for line in printed[0].splitlines() if line.startswith("{")]
    return median([float(line["seconds"]) for line in lines if "seconds" in line][2:])


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 400], help="Mbit/s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    lines = [
        "# Steps on two nodes with a slow link\n",
        "Written by `python -m benchmarks.shaped_link`: a GPT-2 of 4 layers, 256 wide, 128 tokens,",
        "a global batch of 8, one CPU process on each node.\n",
        "| link | plan | measured | predicted | error |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows(options.rates, options.steps):
        print(row, flush=True)
        lines.append(str(row))
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
