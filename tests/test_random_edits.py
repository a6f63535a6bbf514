"""Whatever is edited in a file that people give: it is refused with its place, or harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited_files import KINDS, faults, kinds


@pytest.mark.parametrize("name", KINDS)
def test_edits_are_refused_or_harmless(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kind,) = (kind for kind in kinds() if kind.name == name)
    wrong = list(faults(kind, tmp_path, iter(range(KINDS[name]))))
    assert not wrong, "\n".join(wrong)
    assert "Traceback" not in capsys.readouterr().err
