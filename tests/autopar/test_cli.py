"""How the command line ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import cli
from autopar.commands import plan


def test_an_interrupted_command_says_so_and_leaves_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "gathered_constraints", pressed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autopar", "plan", "model.py", "--gpus", "2", "-o", "o"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"
