"""Edits emitted scripts, one thing at a time, and tells whether verification finds each edit.

`python -m benchmarks.mutations [PLAN…]`; if plans are named, it only prints, and writes no page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.codegen.edits import Edit
from tests.codegen.mutations import HARMLESS, MUTATIONS, PLANS, verdict

RESULTS = Path(__file__).parent / "results" / "mutations.md"
LONGEST = 150  # characters of a verdict

Verdicts = Sequence[tuple[str, str, str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Try every edit, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="*", choices=[*PLANS, []], default=[])
    options = parser.parse_args(argv)
    kinds = options.plans or list(PLANS)
    wrong, harmless = _tried(MUTATIONS, kinds), _tried(HARMLESS, kinds)
    if not options.plans:
        RESULTS.write_text(document(wrong, harmless), encoding="utf-8")


def _tried(table: Mapping[str, Iterable[Edit]], kinds: Sequence[str]) -> Verdicts:
    found = []
    for kind in kinds:
        for edit in table[kind]:
            began = time.perf_counter()
            said = verdict(kind, edit)
            found.append((kind, edit.name, said))
            print(f"{kind:<15} {edit.name:<48} {time.perf_counter() - began:5.1f} s  {said}")
    return found


def document(wrong: Verdicts, harmless: Verdicts) -> str:
    """Return the page."""
    found = sum(said != "equal" for _, _, said in wrong)
    equal = sum(said == "equal" for _, _, said in harmless)
    return "\n".join(
        [
            "# Edited scripts, verified",
            "",
            "`python -m benchmarks.mutations` edits the scripts of five plans (GPT-2 with two "
            "layers and dropout of 0.1, and a ResNet), one thing at a time, and verifies each.",
            "",
            f"Of {len(wrong)} edits that change what is trained, {found} are found. Of "
            f"{len(harmless)} that do not, {equal} are equal.",
            "",
            *_table(wrong),
            "",
            "## Edits that change nothing",
            "",
            *_table(harmless),
            "",
        ]
    )


def _table(rows: Verdicts) -> list[str]:
    head = ["| plan | edit | verdict |", "|---|---|---|"]
    return head + [
        f"| {kind} | {name} | {said[:LONGEST].replace('|', '·').replace('*', chr(92) + '*')} |"
        for kind, name, said in rows
    ]


if __name__ == "__main__":
    main()
