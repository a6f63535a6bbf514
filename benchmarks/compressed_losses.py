"""Trains zoo models with compressed gradients and without, and writes their losses.

`python -m benchmarks.compressed_losses [STEPS]` takes minutes on two idle cores. The script of each
model trains it on two data ranks, with the model file's dataset, optimizer and schedule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from autopar.codegen.emit import write_script
from autopar.planner.costs.prediction import Zero
from autopar.planner.precision import Compression
from tests.codegen.plans import pinned_plan
from tests.codegen.test_resume import run_as_given
from tests.runtime.processes import run_on_ranks

RESULT = Path(__file__).parent / "results" / "compressed_losses.md"
MODELS = {
    "gpt2.py": ("layers=2", "dropout=0.0"),
    "mnist.py": (),
    "intent.py": (),
}
KINDS = tuple(one for one in Compression if one.keeps_lost or not one.words)
STEPS, BATCH, LAST = 300, 16, 20  # the mean of the last losses is shown


def main(argv: Sequence[str]) -> None:
    """Train all models, and write the page."""
    steps = int(argv[0]) if argv else STEPS
    rows = []
    for name, arguments in MODELS.items():
        losses = {one: _losses(name, arguments, one, steps) for one in KINDS}
        rows.append((name, losses))
        print(name, {one.value: mean(found[-LAST:]) for one, found in losses.items()}, flush=True)
    text = "\n".join(_page(rows, steps)) + "\n"
    if steps == STEPS:
        RESULT.write_text(text, encoding="utf-8")
    print(text)


def _losses(
    name: str, arguments: tuple[str, ...], compression: Compression, steps: int
) -> list[float]:
    plan = pinned_plan(
        name,
        arguments,
        data=2,
        global_batch=BATCH,
        zero_levels=(Zero.NONE,),
        compression=(compression,),
    )
    given = ["--steps", str(steps), "--log-every", "1", "--export", "none"]
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        return run_on_ranks(run_as_given, 2, str(path), given, timeout_seconds=1200.0)[0]


def _page(rows: Sequence[tuple[str, dict[Compression, list[float]]]], steps: int) -> Iterator[str]:
    yield f"Losses after {steps} steps of {BATCH} rows on two data ranks: means of the last {LAST}."
    yield ""
    yield f"| model | first | {' | '.join(one.sums for one in KINDS)} |"
    yield f"| --- | ---: |{' ---: |' * len(KINDS)}"
    for name, losses in rows:
        first = losses[Compression.NONE][0]
        means = " | ".join(f"{mean(losses[one][-LAST:]):.4f}" for one in KINDS)
        yield f"| {name.removesuffix('.py')} | {first:.4f} | {means} |"


if __name__ == "__main__":
    main(sys.argv[1:])
