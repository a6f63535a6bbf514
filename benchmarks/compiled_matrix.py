"""Trains models with compiled layers, and tabulates which trainings equal one process.

`python -m benchmarks.compiled_matrix [MODEL…] [--kinds KIND…] [--backend inductor]
[--dtype float32] [--missing]`, where names are patterns. Each cell is saved at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.codegen.compiled_cells import KINDS, SUBJECTS
from tests.codegen.compiled_runs import TOLERANCES, compiled_cell

RESULTS = Path(__file__).parent / "results" / "compiled_matrix.md"
CELLS = RESULTS.with_suffix(".jsonl")
BACKENDS = ("aot_eager", "inductor")
WAYS = {  # a backend and a dtype, by the title of their table
    backend if dtype == "float64" else f"{backend} in {dtype}": (backend, dtype)
    for backend in BACKENDS
    for dtype in TOLERANCES
}
Cells = Mapping[tuple[str, str, str], Mapping[str, Any]]  # by way, model and kind


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the cells one after another, and rewrite the page after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="patterns, as in `GPT*`")
    parser.add_argument("--kinds", nargs="+", default=["*"], help="patterns, as in `tp*`")
    parser.add_argument("--backend", choices=BACKENDS, default="aot_eager")
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="float64")
    parser.add_argument(
        "--missing", action="store_true", help="only cells that are not kept as equal or refused"
    )
    options = parser.parse_args(argv)
    (way,) = (one for one, own in WAYS.items() if own == (options.backend, options.dtype))
    for model in _matching(SUBJECTS, options.models or ["*"]):
        for kind in _matching(KINDS, options.kinds):
            place = way, model, kind
            if (
                options.missing
                and kept_cells().get(place, {"verdict": "wrong"})["verdict"] != "wrong"
            ):
                continue
            began = time.process_time()
            found = compiled_cell(SUBJECTS[model], KINDS[kind], *WAYS[way])
            row = {
                "verdict": found.verdict,
                "detail": found.detail,
                "graphs": max((sum(one.graphs) for one in found.ranks), default=0),
                "again": max((one.again for one in found.ranks), default=0),
                "breaks": sorted({_short(text) for one in found.ranks for text in one.breaks}),
                "warned": sorted({_short(text) for one in found.ranks for text in one.warned}),
                "eager": list(found.eager),
            }
            seconds = [time.process_time() - began, *(one.cpu_seconds for one in found.ranks)]
            print(f"{model:<26} {kind:<18} {sum(seconds):5.1f} s  {row}", flush=True)
            cells = {**kept_cells(), place: row}
            _keep(cells)
            RESULTS.write_text(page(cells), encoding="utf-8")


def _short(text: str) -> str:
    """Return the first lines of a message of torch, without its advice."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return " · ".join(line for line in lines[:2] if line)[:200]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def kept_cells() -> Cells:
    """Return the cells of earlier runs whose model and kind still exist."""
    found = {}
    for line in CELLS.read_text(encoding="utf-8").splitlines() if CELLS.exists() else ():
        row = json.loads(line)
        place = row.pop("backend"), row.pop("model"), row.pop("kind")
        if place[1] in SUBJECTS and place[2] in KINDS:
            found[place] = row
    return found


def _keep(cells: Cells) -> None:
    order = [(way, model, kind) for way in WAYS for model in SUBJECTS for kind in KINDS]
    lines = [
        json.dumps(
            {"backend": place[0], "model": place[1], "kind": place[2], **cells[place]},
            ensure_ascii=False,
        )
        for place in order
        if place in cells
    ]
    CELLS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def page(cells: Cells) -> str:
    """Return the matrix as Markdown, a table for each backend, and what was found on the way."""
    lines = [
        "# Compiled layers against one process",
        "",
        "Written by `python -m benchmarks.compiled_matrix`: three steps in float64 on gloo",
        "processes, and a fourth with random numbers. A cell has the greatest difference of a",
        "loss, a gradient norm, a gradient or a parameter, and how many graphs a rank compiled. In",
        "float32, it has that of a loss, relative to the loss, and 1e-5 or less is equal.",
        "`aot_eager` is torch.compile without code of inductor. Empty cells were not computed;",
        "no plan splits a sequence that a model does not have (an image, a single feature).",
        "The steps run in a mode that turns dropout off. Its own code breaks graphs, too: the",
        "breaks of transformer_lm's pipeline are all there.",
    ]
    for way in WAYS:
        own = {place[1:]: row for place, row in cells.items() if place[0] == way}
        kinds = [kind for kind in KINDS if any(place[1] == kind for place in own)]
        if not own:
            continue
        lines += ["", f"## {way}", "", "| model | " + " | ".join(kinds) + " |"]
        lines.append("|---|" + "---|" * len(kinds))
        for model in SUBJECTS:
            row = [_shown(own.get((model, kind))) for kind in kinds]
            if any(row):
                lines.append(f"| {model} | " + " | ".join(row) + " |")
        counts = {
            word: sum(row["verdict"] == word for row in own.values())
            for word in ("equal", "refused", "wrong")
        }
        lines += ["", ", ".join(f"{count} {word}" for word, count in counts.items()) + "."]
        lines += _told("Refused", own, lambda row: row["verdict"] == "refused" and [row["detail"]])
        lines += _told("Where graphs break", own, lambda row: row["breaks"])
        of_models = {(model,): row for (model, _), row in own.items() if "eager" in row}
        lines += _told("Layers that stay eager", of_models, lambda row: row["eager"])
        lines += _told("Warnings", own, lambda row: row["warned"])
        lines += _told("Compiled after the second step", own, lambda row: row["again"] and ["yes"])
    return "\n".join(lines) + "\n"


def _told(title: str, cells: Mapping[Any, Mapping[str, Any]], what: Any) -> list[str]:
    """Return a list of texts with the cells that have them."""
    found: dict[str, list[str]] = {}
    for place, row in cells.items():
        for text in what(row) or ():
            found.setdefault(text, []).append(" ".join(place))
    if not found:
        return []
    return ["", f"{title}:", "", *(f"- {text}: {', '.join(at)}" for text, at in found.items())]


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None or row["verdict"] == "refused":
        return "" if row is None else "refused"
    word = "" if row["verdict"] == "equal" else "wrong: "
    return f"{word}{row['detail']} ({row['graphs']})"


if __name__ == "__main__":
    main()
