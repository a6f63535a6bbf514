"""Compares predicted with measured steps on two nodes whose link is made slow.

    python -m benchmarks.shaped_link [KIND …] [--rates 100 400] [--runs 2] [-o FILE]

Two network namespaces of this machine are the nodes (root only); `tc` shapes both ends of the cable
between them. A GPT-2 is planned for two CPU processes and a network of that rate, with profiled
ops, and trained by one torchrun on each node. Its batch is small, so that most of a step is
messages. A training over the unshaped cable shows how long a step takes without these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from autopar.api import plan
from tests.codegen.two_nodes import CABLE, PLACE, start_on, two_nodes, why_not
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "shaped_link.md"
ARGUMENTS: dict[str, object] = {"dim": 256, "layers": 4, "seq_len": 16, "dropout": 0.0}
GPT2 = ROOT / "models_zoo" / "gpt2.py"
ROUND = 4  # local steps to an outer step; means are taken over whole rounds
STEPS = 2 * ROUND  # that count; the steps of a round come before
FREE = 10_000  # Mbit/s, about the rate of the unshaped cable
WHOLE = "[pins]\ndp = 2\nzero = 0\n"
# constraints of the plans
KINDS: Mapping[str, str] = {
    "dp 2": WHOLE,
    "dp 2, ZeRO-3": "[pins]\ndp = 2\nzero = 3\n",
    "pp 2": '[pins]\npp = 2\nmicrobatch = 1\nschedule = "1f1b"\n',
    "dp 2, 16-bit sums": f"{WHOLE}[choices]\ncompressed_gradients = true\n",
    "dp 2, int8": f'{WHOLE}[choices]\ncompressed_gradients = "int8"\n',
    "dp 2, PowerSGD": f'{WHOLE}[choices]\ncompressed_gradients = "powersgd"\n',
    f"dp 2, {ROUND} local steps": f"{WHOLE}shard = 1\n[choices]\nsync_every = {ROUND}\n",
}
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
class Run:
    """The mean step of a training, and the bytes that its first node sent in it."""

    seconds: float
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan on a link: what its step was predicted to take, and what it took."""

    rate: int  # Mbit/s
    kind: str
    sent_bytes: float
    predicted: tuple[float, float]  # seconds of a step, and how many a fast link would save
    measured: tuple[float, float]

    def __str__(self) -> str:
        cells = (
            f"{priced * 1e3:,.0f} ms | {measured * 1e3:,.0f} ms | {priced / measured - 1:+.1%}"
            for priced, measured in zip(self.predicted, self.measured, strict=True)
        )
        sent = f"{self.sent_bytes / 1e6:.2f} MB"
        return f"| {self.rate} Mbit/s | {self.kind} | {sent} | {' | '.join(cells)} |"


def profiled(place: Path) -> Path:
    """Measure the model's ops on this machine."""
    made = place / "measured.toml"
    words = [word for key, value in ARGUMENTS.items() for word in ("--arg", f"{key}={value}")]
    words += ["--batch", "1", "--precision", "fp32", "--budget", "30", "-o", str(made)]
    command = [sys.executable, "-m", "autopar", "profile", str(GPT2), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return made


def shape(node: str, rate: int) -> None:
    """Limit what a node sends to `rate` Mbit/s, with the short queue of a switch's port."""
    queue = ("tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "20ms")
    words = ["ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", CABLE, "root", *queue]
    subprocess.run(words, check=True)


def rows(kinds: Sequence[str], rates: Sequence[int], runs: int) -> Iterator[Row]:
    """Plan and train with each kind of plan on each link, and without a limit."""
    with TemporaryDirectory(prefix="shaped-link-") as folder:
        place = Path(folder)
        measured = profiled(place)
        for kind in kinds:
            constraints = place / f"{kind}.toml"
            constraints.write_text(KINDS[kind], encoding="utf-8")
            predicted, found = dict[int, float](), dict[int, Run]()
            for rate in (*rates, FREE):
                cluster = place / f"{rate}.toml"
                cluster.write_text(CLUSTER.format(rate=rate), encoding="utf-8")
                made = plan(
                    GPT2,
                    arguments=ARGUMENTS,
                    cluster=cluster,
                    constraints=constraints,
                    precision="fp32",
                    global_batch=2,
                    profile=measured,
                )
                out = place / f"{rate}-{kind}"
                made.write(out)
                tried = [trained(out, None if rate == FREE else rate) for _ in range(runs)]
                predicted[rate], found[rate] = made.step_seconds, min(tried, key=_seconds)
            for rate in rates:
                yield Row(
                    rate=rate,
                    kind=kind,
                    sent_bytes=found[rate].sent_bytes,
                    predicted=(predicted[rate], predicted[rate] - predicted[FREE]),
                    measured=(found[rate].seconds, found[rate].seconds - found[FREE].seconds),
                )


def _seconds(run: Run) -> float:
    return run.seconds


def trained(out: Path, rate: int | None) -> Run:
    """Train, and return the mean of all steps but those of the first round."""
    script = ("-m", "torch.distributed.run", *PLACE, "--nproc-per-node", "1", str(out / "train.py"))
    steps = ("--steps", str(ROUND + STEPS), "--log-every", "1", "--json", "--export", "none")
    with two_nodes() as nodes, warm_python():
        for node in nodes if rate else ():
            shape(node, rate or FREE)
        jobs = start_on(nodes, out, *script, *steps)
        printed, errors = zip(*(job.communicate(timeout=600) for job in jobs), strict=True)
        sent = sent_by(nodes[0])
    if any(job.returncode for job in jobs):
        raise SystemExit("\n".join(errors))
    lines = [json.loads(line) for line in printed[0].splitlines() if line.startswith("{")]
    seconds = [float(line["seconds"]) for line in lines if "seconds" in line]
    return Run(seconds=mean(seconds[ROUND:]), sent_bytes=sent / len(seconds))


def sent_by(node: str) -> int:
    """Return how many bytes a node has sent over the cable."""
    counter = f"/sys/class/net/{CABLE}/statistics/tx_bytes"
    words = ["ip", "netns", "exec", node, "cat", counter]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 400], help="Mbit/s")
    parser.add_argument("--runs", type=int, default=2, help="of which the fastest counts")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    best = f", of the fastest of {options.runs} trainings" if options.runs > 1 else ""
    lines = [
        "# Steps on two nodes with a slow link\n",
        "Written by `python -m benchmarks.shaped_link`: a GPT-2 of 4 layers, 256 wide, 16 tokens,",
        "a global batch of 2, one CPU process on each node. A step is the mean of two rounds of",
        f"{ROUND} steps{best}. What a node sends is counted on the cable.",
        '"Network" is how much longer a step takes than over the unshaped cable.\n',
        "| link | plan | sent | step predicted | measured | error | network predicted | measured "
        "| error |",
        f"|---|---|{'--:|' * 7}",
    ]
    for row in rows(options.kinds or list(KINDS), options.rates, options.runs):
        print(row, flush=True)
        lines.append(str(row))
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
