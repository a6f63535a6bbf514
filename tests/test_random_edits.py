"""Whatever is edited in a file that people give: it is refused with its place, or harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import cells
from tests.edited_files import KINDS, faults, kinds

HALVES = [(name, half) for half in range(2) for name in KINDS]


@pytest.mark.parametrize(("name", "half"), cells(HALVES, HALVES[: len(KINDS)]))
def test_edits_are_refused_or_harmless(
    name: str, half: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = iter(range(half, KINDS[name], 2))
    wrong = list(faults(kinds()[name], tmp_path, seeds))
    assert not wrong, "\n".join(wrong)
    assert "Traceback" not in capsys.readouterr().err
