"""Where weights may be left, and what lies there already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autopar.runtime.keeping.places import MARK, destination
from autopar.runtime.ranks.mesh import Mesh


def test_what_another_program_left_is_not_replaced(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, path)
    for place in (path, tmp_path):
        with pytest.raises(SystemExit) as left:
            destination(str(place), mesh)
        assert left.value.code == 6
        assert f"{path} is there, and autopar has not written it" in capsys.readouterr().err
    save_file({"x": torch.ones(2)}, path, metadata=dict(MARK))
    assert destination(str(path), mesh) is not None


def test_a_place_that_cannot_be_written_is_told_before_anything_is_trained(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        destination(str(tmp_path / "file" / "out"), mesh)
    assert "nothing can be written" in capsys.readouterr().err


def test_none_keeps_nothing(mesh: Mesh) -> None:
    assert destination("none", mesh) is None
