"""Trains every zoo model under every kind of plan, and tabulates which trainings equal one process.

`python -m benchmarks.equality_matrix [MODEL…] [--kinds PATTERN…] [--dtype float32]`; if models or
kinds are named, it only prints their cells, and does not write the results file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from autopar.planner.errors import AutoparError
from tests.codegen.matrix import STEPS, TOLERANCE, compare_cell, worst_of
from tests.codegen.matrix_cells import KINDS, SUBJECTS, is_applicable

RESULTS = Path(__file__).parent / "results" / "equality_matrix.md"

NO_AXES = "–"

Cells = Mapping[tuple[str, str], str]


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the cells one after another, and write the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*SUBJECTS, []], default=[])
    parser.add_argument("--kinds", nargs="+", default=["*"], help="patterns, as in `pp*`")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float64")
    options = parser.parse_args(argv)
    kinds = [k for k in KINDS if any(fnmatchcase(k, pattern) for pattern in options.kinds)]
    cells = {}
    for model in options.models or SUBJECTS:
        for kind in kinds:
            began = time.perf_counter()
            cells[model, kind] = cell(model, kind, options.dtype)
            seconds = time.perf_counter() - began
            print(f"{model:<15} {kind:<26} {seconds:5.1f} s  {cells[model, kind]}", flush=True)
    if len(cells) == len(SUBJECTS) * len(KINDS):
        RESULTS.write_text(document(cells, options.dtype), encoding="utf-8")


def cell(model: str, kind: str, dtype: str) -> str:
    """Return the result of one model under one kind of plan: equal, refused or wrong."""
    if not is_applicable(model, kind):
        return NO_AXES
    try:
        comparison = compare_cell(model, kind, dtype=dtype)
    except AutoparError as refusal:
        return f"refused: {refusal.found}"
    except Exception as failure:  # a result, too
        return f"wrong: {type(failure).__name__}: {failure}"
    worst = worst_of(comparison, dtype)
    word = "equal" if worst.largest <= TOLERANCE[dtype] else "wrong"
    return f"{word}: {worst.largest:.1e}" + (f" {worst.name}" if word == "wrong" else "")


def document(cells: Cells, dtype: str) -> str:
    """Return the matrix as Markdown: a row for each kind, and the reasons of the refusals."""
    reasons = list(dict.fromkeys(text for text in cells.values() if text.startswith("refused")))
    lines = [
        "# Scripts against one process",
        "",
        f"{STEPS} steps in {dtype} on gloo processes (a kind's name ends with their number), with",
        "clipping, accumulation and ignored targets. A cell has the greatest difference of a loss",
        "(relative), a clipped gradient, a parameter or a running statistic. –: the model has no",
        "such axis. The reasons of refused plans follow the table.",
        "",
        "| plan | " + " | ".join(SUBJECTS) + " |",
        "|---|" + "---|" * len(SUBJECTS),
    ]
    for kind in KINDS:
        shown = [_shown(cells[model, kind], reasons) for model in SUBJECTS]
        lines.append(f"| {kind} | " + " | ".join(shown) + " |")
    lines.append("")
    lines += [f"{number}. {text}" for number, text in enumerate(reasons, start=1)]
    counts = {
        w: sum(t.startswith(w) for t in cells.values()) for w in ("equal", "refused", "wrong")
    }
    lines += ["", ", ".join(f"{count} {word}" for word, count in counts.items()) + "."]
    return "\n".join(lines) + "\n"


def _shown(text: str, reasons: Sequence[str]) -> str:
    if text in reasons:
        return f"refused {reasons.index(text) + 1}"
    return text.splitlines()[0][:60]


if __name__ == "__main__":
    main()
