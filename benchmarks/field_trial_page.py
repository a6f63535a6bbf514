"""Turns the cells of the field trial into its page: two tables, counts, reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.field.cells import AWKWARD, FAMILIES, KINDS
from tests.field.trial import HALF_TOLERANCE, STEPS, TOLERANCE, Cell, ExitReason

Cells = Mapping[tuple[str, str], Cell]

REAL_SPLIT = 0.6  # the least share of the matrix FLOPs that tensor ranks divide


def page(cells: Cells) -> str:
    """Return the page with all cells that were computed."""
    reasons = list(
        dict.fromkeys(c.detail for c in cells.values() if c.verdict is not ExitReason.EQUAL)
    )
    lines = [
        "# Field trial: models that nobody here wrote",
        "",
        f"Every model is planned, and its script trains {STEPS} steps in float64 on gloo processes",
        "(a kind's name ends with their number), compared with one process of plain PyTorch. A",
        "cell has the largest difference of a loss, a clipped gradient, a parameter or a running",
        f"statistic; {TOLERANCE:g} or less is equal. In bf16, it has the script's distance from",
        "fp32, in losses and first gradients, divided by that of one process in bf16;",
        f"{HALF_TOLERANCE:g} or less is equal. That hides a gradient counted twice where bf16",
        "itself is a third off, as with ResNet's batch norms over few rows; float64 shows it.",
        "Percentages are shares of the matrix FLOPs that tensor ranks divide. Reasons of refused",
        "plans follow the tables; cells that were not run are empty. Told: pins split a batch",
        "whose rows depend on each other, and `autopar plan` warns of that.",
    ]
    for title, subjects in (("Families of Hugging Face", FAMILIES), ("Awkward shapes", AWKWARD)):
        there = [subject for subject in subjects if any(s == subject for s, _ in cells)]
        if there:
            lines += ["", f"## {title}", "", *_table(there, cells, reasons)]
            lines += ["", *_counts(there, cells)]
    lines += ["", "## Reasons", ""]
    lines += [f"{n}. {' '.join(text.split())}" for n, text in enumerate(reasons, start=1)]
    return "\n".join(lines) + "\n"


def _table(subjects: Sequence[str], cells: Cells, reasons: Sequence[str]) -> Iterator[str]:
    yield "| model | " + " | ".join(KINDS) + " |"
    yield "|---|" + "---|" * len(KINDS)
    for subject in subjects:
        row = [_shown(cells.get((subject, kind)), reasons) for kind in KINDS]
        yield f"| {subject} | " + " | ".join(row) + " |"


def _shown(cell: Cell | None, reasons: Sequence[str]) -> str:
    if cell is None:
        return ""
    if cell.verdict is not ExitReason.EQUAL:
        return f"{cell.verdict} {reasons.index(cell.detail) + 1}"
    share = "" if cell.divided is None else f" ({cell.divided:.0%})"
    return f"{cell.detail}{share}"


def _counts(subjects: Sequence[str], cells: Cells) -> Iterator[str]:
    yield "| | equal | refused | told | wrong | really split |"
    yield "|---|--:|--:|--:|--:|--:|"
    totals = dict.fromkeys(ExitReason, 0)
    for kind in KINDS:
        own = [cells[s, kind] for s in subjects if (s, kind) in cells]
        counts = {verdict: sum(c.verdict is verdict for c in own) for verdict in ExitReason}
        totals = {verdict: totals[verdict] + count for verdict, count in counts.items()}
        split = ""
        if KINDS[kind].tensor is not None and own:
            real = [c for c in own if c.verdict is ExitReason.EQUAL and _is_split(c)]
            split = f"{len(real)} of {len(own)}"
        yield f"| {kind} | " + " | ".join(map(str, counts.values())) + f" | {split} |"
    yield "| all | " + " | ".join(map(str, totals.values())) + " | |"


def _is_split(cell: Cell) -> bool:
    return cell.divided is not None and cell.divided >= REAL_SPLIT
