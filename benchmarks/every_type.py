"""Takes every model type of transformers, made tiny, through plan, script and training.

`python -m benchmarks.every_type [TASK[:TYPE]…] [--missing]`. Each type is planned with dp 2, with
pp 2 and with tp 2, and twice with full recomputation: under ZeRO-3, and in a pipeline. In these
two, decoders keep their caches of keys and values. Each installed library of models (timm,
torchvision) is a task, too. Types that plain PyTorch does not train in these sizes are not tried.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace.build import build
from benchmarks.every_type_page import NOT_MADE, CellKey, page
from tests.field.cells import KINDS as FIELD_KINDS
from tests.field.cells import Kind, Subject
from tests.field.libraries import kinds_of, subject_of
from tests.field.models.any_type import TASKS
from tests.field.trial import Cell, ExitReason, cell

RESULTS = Path(__file__).parent / "results" / "every_type.md"
CELLS = RESULTS.with_suffix(".jsonl")
KINDS = {
    "dp 2": Kind(ranks=2, data=2),
    "pp 2": Kind(ranks=2, pipeline=2),
    "tp 2": Kind(ranks=2, tensor=2),
    "full zero-3 2": FIELD_KINDS["full zero-3 2"],
    "full pp 2": FIELD_KINDS["full pp 2"],
}
_MOST_PARAMETERS = 35_000_000
_MOST_SECONDS = 4.0  # of a step: a field trial has dozens, in float64


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the cells one after another, and rewrite the page after each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="*", help="tasks, or task:type", default=list(TASKS))
    parser.add_argument("--missing", action="store_true", help="only cells that are not kept yet")
    options = parser.parse_args(argv)
    for task, kind in _wanted(options.wanted):
        kept = kept_cells()
        if not options.missing:
            kept = {place: one for place, one in kept.items() if place[:2] != (task, kind)}
        names = [name for name in KINDS if (task, kind, name) not in kept]
        if not names or (task, kind, NOT_MADE) in kept:
            continue
        began = time.perf_counter()
        found = dict(_cells(task, kind, names))
        words = (f"{place[2]} {one.verdict} {one.detail[:60]}" for place, one in found.items())
        seconds = time.perf_counter() - began
        print(f"{task:<9} {kind:<24.24} {seconds:5.1f} s  {', '.join(words)}", flush=True)
        cells = dict(sorted({**kept, **found}.items()))
        rows = ({"place": place, **asdict(one)} for place, one in cells.items())
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        CELLS.write_text("\n".join(lines) + "\n", encoding="utf-8")
        RESULTS.write_text(page(cells), encoding="utf-8")


def _wanted(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        task, _, kind = name.partition(":")
        yield from ((task, one) for one in kinds_of(task) if kind in ("", one))


def _cells(task: str, kind: str, names: Sequence[str]) -> Iterator[tuple[CellKey, Cell]]:
    plain, cached = subject_of(task, kind), subject_of(task, kind, cache=True)
    fault = _fault(plain)
    if fault:
        yield (task, kind, NOT_MADE), Cell(verdict=ExitReason.REFUSED, detail=fault)
        return
    again = plain if _fault(cached) else cached
    for name in names:
        demanded = KINDS[name]
        yield (task, kind, name), cell(plain if demanded.recompute is None else again, demanded)


def _fault(subject: Subject) -> str:
    """Return why a model cannot be tried (plain PyTorch fails, too large, too slow), or ""."""
    file = load_model_file(str(subject.path), subject.arguments)
    try:
        built = build(file, device="cpu", dtype=None, batch_size=4)
        size = sum(parameter.numel() for parameter in built.model.parameters())
        if size > _MOST_PARAMETERS:
            return f"{size:,} parameters"
        began = time.perf_counter()
        built.step.run(built.batch).backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - began
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return f"a step of {seconds:.1f} s" if seconds > _MOST_SECONDS else ""


def kept_cells() -> Mapping[CellKey, Cell]:
    """Return the cells that earlier runs have left."""
    found: dict[CellKey, Cell] = {}
    for line in CELLS.read_text(encoding="utf-8").splitlines() if CELLS.exists() else ():
        row = json.loads(line)
        task, kind, name = row.pop("place")
        found[task, kind, name] = Cell(**{**row, "verdict": ExitReason(row["verdict"])})
    return found


if __name__ == "__main__":
    main()
