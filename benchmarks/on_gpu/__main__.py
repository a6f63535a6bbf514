"""Answers, in minutes, what one GPU can tell of emitted scripts and of the planner's formulas.

    python -m benchmarks.on_gpu [--minutes 12] [--only PART[,PART]] [--tiny] [-o FILE]

Every row is written as soon as it is known: into FILE, and as JSON beside it. With --tiny all parts
run on a CPU with small sizes, which shows that the benchmark itself works.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.on_gpu.compiled import compiled
from benchmarks.on_gpu.context import Context, place_here
from benchmarks.on_gpu.ops import ops
from benchmarks.on_gpu.ranks import ranks
from benchmarks.on_gpu.report import Report, Row
from benchmarks.on_gpu.steps import steps

RESULT = Path(__file__).parents[1] / "results" / "on_gpu.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What yields rows, and how many minutes it may take at most."""

    rows: Callable[[Context], Iterator[Row]]
    minutes: float


PARTS: Mapping[str, Part] = {
    "ranks": Part(rows=ranks, minutes=5.0),
    "steps": Part(rows=steps, minutes=6.0),
    "ops": Part(rows=ops, minutes=2.0),
    "compile": Part(rows=compiled, minutes=2.0),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts one after the other, as long as there is time."""
    options = _options(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a rented host may not resolve
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ends = time.monotonic() + 60 * options.minutes
    probe = Context(device="", tiny=options.tiny)
    place = probe.alone(place_here)
    context = Context(
        device="cpu" if "CPU" in place else "cuda", tiny=options.tiny, pools=probe.pools
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".jsonl").write_text("", encoding="utf-8")
    report = Report(page=options.output, place=place)
    report.say(f"on {place}")
    try:
        for name in options.only:
            context.deadline = min(ends, time.monotonic() + 60 * PARTS[name].minutes)
            _run(name, context, report)
    finally:
        context.end()


def _run(name: str, context: Context, report: Report) -> None:
    if context.seconds_left < 1:
        report.say(f"{name}: no time is left")
        return
    report.say(f"{name} begins")
    try:
        for row in PARTS[name].rows(context):
            report.add(row)
    except Exception as error:
        where = traceback.format_exc().strip().splitlines()[-3:]
        report.add(Row(table=f"{name}: failed", cells={"error": f"{error}", "at": " ".join(where)}))
    report.say(f"{name} ends")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no part goes on")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts, with commas: {', '.join(PARTS)}"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    main()
