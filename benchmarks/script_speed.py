"""Compares the step of emitted scripts with the same training written by hand with torch's tools.

    python benchmarks/script_speed.py [--pairs 40] [--rounds 3] [--only NAME …] [-o FILE]

GPT-2 in two sizes on two gloo processes of one thread. Each round starts both trainings in the same
two processes, from the same weights, over the same tokens, and runs their steps in turns; a pair is
one step of each. The ratio is hand-written time ÷ script time: the median over the pairs of all
rounds. Both sides clip, use the fused AdamW, and must arrive at the same loss.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import torch

from autopar.codegen.emit import write_script
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planning import make_plan
from benchmarks.script_speed_ranks import RANKS, Pair, Timed, timed

MODEL = Path(__file__).parents[1] / "models_zoo" / "gpt2.py"
RESULT = Path(__file__).parent / "results" / "script_speed.md"
SAME_LOSS = 1e-3  # relative, in fp32 after some dozens of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A GPT-2 and the rows of a step."""

    name: str
    arguments: tuple[str, ...]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The pins of a plan, the hand-written training to compare it with, and the ratio to reach."""

    name: str
    pins: str
    rows_of_microbatch: float  # as a share of the global batch
    hand: str
    target: float


SIZES = (
    Size(name="tiny", arguments=("size=tiny", "dropout=0.0"), batch=16),
    Size(
        name="4 layers of 256",
        arguments=(
            "dim=256",
            "heads=8",
            "layers=4",
            "seq_len=128",
            "vocab_size=1024",
            "dropout=0.0",
        ),
        batch=8,
    ),
)
CASES = (
    Case(
        name="DDP",
        pins="dp=2,zero=0",
        rows_of_microbatch=0.5,
        hand="DistributedDataParallel",
        target=1.0,
    ),
    Case(
        name="ZeRO-1",
        pins="dp=2,zero=1",
        rows_of_microbatch=0.5,
        hand="DDP + ZeroRedundancyOptimizer",
        target=1.0,
    ),
    Case(
        name="ZeRO-2",
        pins="dp=2,zero=2",
        rows_of_microbatch=0.5,
        hand="fully_shard, kept gathered",
        target=1.0,
    ),
    Case(name="ZeRO-3", pins="dp=2,zero=3", rows_of_microbatch=0.5, hand="fully_shard", target=1.0),
    Case(
        name="PP",
        pins="pp=2,schedule=1f1b",
        rows_of_microbatch=0.25,
        hand="PipelineStage, Schedule1F1B",
        target=1.0,
    ),
    Case(name="TP", pins="tp=2", rows_of_microbatch=1, hand="parallelize_module", target=1.2),
    Case(
        name="TP",
        pins="tp=2",
        rows_of_microbatch=1,
        hand="parallelize_module + SequenceParallel",
        target=1.2,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case at a size, and its pairs of all rounds."""

    case: Case
    size: Size
    pairs: tuple[Pair, ...]

    @property
    def ratio(self) -> float:
        """Return how many times as fast the script is: the median of the pairs."""
        return median(pair.ratio for pair in self.pairs)

    @property
    def core_ratio(self) -> float:
        """Return the same ratio of CPU times, which other programs hardly change."""
        return median(pair.core_ratio for pair in self.pairs)


def measured(case: Case, size: Size, *, pairs: int, rounds: int) -> Row:
    """Emit the script of a case and run it beside the hand-written training."""
    with TemporaryDirectory(prefix="script-speed-") as name:
        folder = Path(name)
        script = emitted(case, size, folder)
        found = [_round(script, case, folder / str(number), pairs) for number in range(rounds)]
    return Row(case=case, size=size, pairs=tuple(pair for one in found for pair in one.pairs))


def emitted(case: Case, size: Size, folder: Path) -> Path:
    """Plan what a case pins and write its script."""
    rows = round(size.batch * case.rows_of_microbatch)
    wanted = {"global_batch": str(size.batch), "precision": "fp32"}
    plan = make_plan(
        str(MODEL),
        size.arguments,
        choose_cluster(RANKS, "cpu"),
        gathered_constraints([f"{case.pins},microbatch={rows}"], wanted, None),
        time_limit_seconds=None,
    )
    return write_script(plan, folder)


def _round(script: Path, case: Case, folder: Path, pairs: int) -> Timed:
    folder.mkdir()
    found = timed(script, case.hand, pairs=pairs, folder=folder)
    ours, theirs = found.losses
    if not abs(ours - theirs) <= SAME_LOSS * abs(theirs):
        raise SystemExit(f"{case.name} against {case.hand}: losses differ, {ours} and {theirs}")
    return found


def report(rows: Sequence[Row], *, rounds: int) -> Iterator[str]:
    """Yield the lines of the result."""
    yield "# The emitted script against the same training by hand\n"
    yield (
        f"Written by `benchmarks/script_speed.py`, torch {torch.__version__}, {RANKS} gloo "
        f"processes of one thread. Ratio: hand-written time ÷ script time, the median of pairs of "
        f"steps in turns, {rounds} rounds; beside it the middle half of the pairs, and the ratio "
        f"of CPU times, which leaves waiting out. Load average at the end: "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.\n"
    )
    columns = "GPT-2|plan|by hand|pairs|script|by hand|ratio|middle half|of cores|target|"
    yield f"|{columns}|"
    yield "|---" * (columns.count("|") + 1) + "|"
    for row in rows:
        low, _, high = quantiles((pair.ratio for pair in row.pairs), n=4)
        yield (
            f"| {row.size.name} | {row.case.name} | {row.case.hand} | {len(row.pairs)} "
            f"| {seconds_text(median(pair.script_seconds for pair in row.pairs))} "
            f"| {seconds_text(median(pair.hand_seconds for pair in row.pairs))} "
            f"| {row.ratio:.3f} | {low:.2f} … {high:.2f} | {row.core_ratio:.3f} "
            f"| {row.case.target:.2f} | {'reached' if row.ratio >= row.case.target else 'missed'} |"
        )


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=40, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="plans, such as DDP")
    parser.add_argument("--size", nargs="*", help="models, such as tiny")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for size in SIZES:
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            if options.size and size.name not in options.size:
                continue
            rows.append(measured(case, size, pairs=options.pairs, rounds=options.rounds))
            print(f"{size.name}, {case.name}, {case.hand}: {rows[-1].ratio:.3f}", flush=True)
    text = "\n".join(report(rows, rounds=options.rounds)) + "\n"
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
