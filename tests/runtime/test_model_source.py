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
    path, neighbour, module = tmp_path / "net.py", tmp_path / "parts/block.py", ModuleType("net")
    module.__file__ = str(path)
    neighbour.parent.mkdir()
    for file in (path, neighbour):
        file.write_text("x = 1\n", encoding="utf-8")
    names, mesh = ("net.py", "parts/block.py"), start(pipeline=1, data=1, tensor=1)
    digest = source_digest([path, neighbour])
    note_changes(module, names, digest, mesh)
    assert capsys.readouterr().err == ""
    neighbour.write_text("x = 2\n", encoding="utf-8")
    note_changes(module, names, digest, mesh)
    assert "net.py, or a file that it imports, has changed since" in capsys.readouterr().err
    note_changes(module, names[:1], source_digest([neighbour]), mesh)
    assert "note: net.py has changed since this script was written" in capsys.readouterr().err
    stop(mesh)
