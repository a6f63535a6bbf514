"""A script says where the model file is no longer the one that its classes come from."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from autopar.runtime.mesh import start, stop
from autopar.runtime.model_source import note_changes, source_digest


def test_a_changed_model_file_is_noted_and_an_unchanged_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, module = tmp_path / "net.py", ModuleType("net")
    module.__file__ = str(path)
    path.write_text("x = 1\n", encoding="utf-8")
    digest, mesh = source_digest(path), start(pipeline=1, data=1, tensor=1)
    note_changes(module, digest, mesh)
    assert capsys.readouterr().err == ""
    path.write_text("x = 2\n", encoding="utf-8")
    note_changes(module, digest, mesh)
    assert "net.py has changed since this script was written" in capsys.readouterr().err
    stop(mesh)
