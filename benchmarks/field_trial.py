"""Takes other people's models through plan, script and training, and tabulates the results.

`python -m benchmarks.field_trial [SUBJECT…] [--kinds KIND…] [--missing]`, where names are patterns.
Every result is saved at once, so that a part of the trial can be repeated after a fix.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.field_trial_page import Cells, page
from tests.field.cells import KINDS, SUBJECTS
from tests.field.trial import Cell, ExitReason, cell

RESULTS = Path(__file__).parent / "results" / "field_trial.md"
CELLS = RESULTS.with_suffix(".jsonl")


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the cells one after another, and rewrite the page after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", help="patterns, as in `Falcon*`")
    parser.add_argument("--kinds", nargs="+", default=["*"], help="patterns, as in `tp*`")
    parser.add_argument("--missing", action="store_true", help="only cells that are not kept yet")
    options = parser.parse_args(argv)
    for subject in _matching(SUBJECTS, options.subjects or ["*"]):
        for kind in _matching(KINDS, options.kinds):
            if options.missing and (subject, kind) in kept_cells():
                continue
            began = time.perf_counter()
            found = cell(SUBJECTS[subject], KINDS[kind])
            seconds = time.perf_counter() - began
            words = f"{found.verdict} {found.arrangement} {found.detail}"
            print(f"{subject:<22.22} {kind:<9} {seconds:5.1f} s  {words}", flush=True)
            cells = {**kept_cells(), (subject, kind): found}
            _keep(cells)
            RESULTS.write_text(page(cells), encoding="utf-8")


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def kept_cells() -> Cells:
    """Return the cells of earlier runs whose subject and kind still exist."""
    found: dict[tuple[str, str], Cell] = {}
    for line in CELLS.read_text(encoding="utf-8").splitlines() if CELLS.exists() else ():
        row = json.loads(line)
        subject, kind = row.pop("subject"), row.pop("kind")
        if subject in SUBJECTS and kind in KINDS:
            found[subject, kind] = Cell(**{**row, "verdict": ExitReason(row["verdict"])})
    return found


def _keep(cells: Cells) -> None:
    order = [(subject, kind) for subject in SUBJECTS for kind in KINDS]
    rows = [
        {"subject": place[0], "kind": place[1], **asdict(cells[place])}
        for place in order
        if place in cells
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    CELLS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
