"""Checks emitted scripts and the planner's formulas on one GPU, in minutes.

    python -m benchmarks.on_gpu [--minutes 12] [--only PART[,PART]] [--models MODEL[,MODEL]]
        [--tiny] [-o FILE]

PART may also be a single check of the part "ranks"; these checks share their processes, and some
run at the same time. Every row is written as soon as it is known: to FILE, and as JSON beside it. A
log, also beside it, has what all processes print. With --tiny all parts run on a CPU with small
sizes, which shows that the benchmark itself works.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from benchmarks.on_gpu.compiled import compiled, in_float8, on_host
from benchmarks.on_gpu.context import Context, place_here
from benchmarks.on_gpu.ops import ops
from benchmarks.on_gpu.ranks import CHECKS, ranks
from benchmarks.on_gpu.rehearsals import rehearsals
from benchmarks.on_gpu.report import Report, Row
from benchmarks.on_gpu.steps import CASES, steps

RESULT = Path(__file__).parents[1] / "results" / "on_gpu.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function that yields rows, and the most minutes that it may take."""

    rows: Callable[[Context], Iterator[Row]]
    minutes: float


PARTS: Mapping[str, Part] = {
    "ranks": Part(rows=ranks, minutes=5.0),
    "steps": Part(rows=steps, minutes=6.0),
    "ops": Part(rows=ops, minutes=2.0),
    "compile": Part(rows=compiled, minutes=4.0),
    "float8": Part(rows=in_float8, minutes=4.0),
    "offload": Part(rows=on_host, minutes=2.0),
    "rehearse": Part(rows=rehearsals, minutes=4.0),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts one after the other, as long as there is time."""
    options = _options(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a rented host may not resolve
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".jsonl").write_text("", encoding="utf-8")
    with _apart(options.output.with_suffix(".log")) as out:
        _run_all(options, out)


def _run_all(options: argparse.Namespace, out: TextIO) -> None:
    ends = time.monotonic() + 60 * options.minutes
    context = Context(device="", tiny=options.tiny, models=options.models)
    place = context.alone(place_here)
    context.device = "cpu" if "CPU" in place else "cuda"
    report = Report(page=options.output, place=place, out=out)
    report.say(f"on {place}")
    try:
        for name, part in chosen(options.only).items():
            context.deadline = min(ends, time.monotonic() + 60 * part.minutes)
            _run(name, part, context, report)
    finally:
        context.end()


@contextmanager
def _apart(log: Path) -> Iterator[TextIO]:
    """Yield the standard output; inside, everything that processes print goes to a file."""
    own, errors = os.dup(1), os.dup(2)
    with log.open("w", encoding="utf-8") as file, os.fdopen(own, "w", closefd=False) as out:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield out
        finally:
            os.dup2(own, 1)
            os.dup2(errors, 2)


def chosen(names: Sequence[str]) -> Mapping[str, Part]:
    """Return the parts that names stand for, in their order; checks of ranks are one part."""
    checks = tuple(name for name in CHECKS if name in names)
    some = Part(rows=partial(ranks, names=checks), minutes=PARTS["ranks"].minutes)
    return {
        "ranks" if name in CHECKS else name: some if name in CHECKS else PARTS[name]
        for name in names
    }


def _run(name: str, part: Part, context: Context, report: Report) -> None:
    if context.seconds_left < 1:
        report.say(f"{name}: no time is left")
        return
    report.say(f"{name} begins")
    try:
        for row in part.rows(context):
            report.add(row)
    except Exception as error:
        where = traceback.format_exc().strip().splitlines()[-3:]
        report.add(Row(table=f"{name}: failed", cells={"error": f"{error}", "at": " ".join(where)}))
    context.end()  # the next part needs the memory
    report.say(f"{name} ends")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = [*PARTS, *CHECKS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no part goes on")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"with commas, of {', '.join(known)}"
    )
    parser.add_argument(
        "--models",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help=f"whose steps are timed, with commas: {', '.join(one.name for one in CASES)}",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(known):
        parser.error(f"there is no part {', '.join(unknown)}: choose of {', '.join(known)}")
    return options


if __name__ == "__main__":
    main()
