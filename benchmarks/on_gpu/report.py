"""Writes rows of results as they come: a line of JSON each, and a page with all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypeAlias

Cell: TypeAlias = str | int | float | None

_TITLE = "# One GPU: what scripts do there, and what kernels take\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of one of the page's tables."""

    table: str
    cells: Mapping[str, Cell]


@dataclass(slots=True, kw_only=True)
class Report:
    """The rows so far. Each is written at once, since a rented machine may be taken away."""

    page: Path
    place: str  # the device, and the version of torch
    out: TextIO | None = None  # the standard output, if None
    begun: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"{time.monotonic() - self.begun:6.1f} s  {text}", file=self.out, flush=True)

    def add(self, row: Row) -> None:
        """Print a row, after the names of its cells if these are new, and write it."""
        names = " | ".join(row.cells)
        if not self.rows or (self.rows[-1].table, " | ".join(self.rows[-1].cells)) != (
            row.table,
            names,
        ):
            self.say(f"{row.table}: {names}")
        self.rows.append(row)
        self.say(f"  {' | '.join(map(text_of, row.cells.values()))}")
        with self.page.with_suffix(".jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"place": self.place, "table": row.table, **row.cells}) + "\n")
        self.page.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        yield _TITLE
        yield f"Written by `python -m benchmarks.on_gpu` on {self.place}."
        for table in dict.fromkeys(row.table for row in self.rows):
            cells = [row.cells for row in self.rows if row.table == table]
            names = list(dict.fromkeys(name for one in cells for name in one))
            yield f"\n## {table}\n"
            yield f"| {' | '.join(names)} |"
            yield f"|{'---|' * len(names)}"
            for one in cells:
                texts = (text_of(one.get(name)).replace("|", "\\|") for name in names)
                yield f"| {' | '.join(texts)} |"


def error_text(error: BaseException) -> str:
    """Return the first and the last lines of an error, in one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ⏎ ".join(dict.fromkeys((lines[0], *lines[-3:])))[:600]


def text_of(value: Cell) -> str:
    """Return a cell as people read it."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ⏎ ")
