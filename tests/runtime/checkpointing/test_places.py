"""Where weights may be left, and what lies there already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autopar.runtime.checkpointing.model_files import (
    EXPORT_MARK,
    Destination,
    WeightsFile,
    destination,
    files_of_model,
    write_model,
)
from autopar.runtime.checkpointing.safetensors_file import Entry
from autopar.runtime.ranks.locations import MARK, is_named_as_file
from autopar.runtime.ranks.mesh import Mesh


@pytest.mark.parametrize("mark", [None, dict(MARK)], ids=["of a program", "of a checkpoint"])
def test_files_that_no_export_has_written_are_not_replaced(
    mark: dict[str, str] | None, tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata=mark)
    for place in (path, tmp_path):
        with pytest.raises(SystemExit) as left:
            destination(str(place), mesh)
        assert left.value.code == 6
        assert f"{path} is there, and autopar has not exported it" in capsys.readouterr().err
    save_file({"x": torch.ones(2)}, path, metadata=dict(EXPORT_MARK))
    assert destination(str(path), mesh) is not None


def test_a_place_that_cannot_be_written_is_told_before_anything_is_trained(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        destination(str(tmp_path / "file" / "out"), mesh)
    assert "nothing can be written" in capsys.readouterr().err


def written(to: Path, *, fails: BaseException | None = None) -> None:
    """Export one tensor; where something is to be raised, it is while the tensor is made."""

    def made(_: WeightsFile, entry: Entry) -> torch.Tensor:
        if fails is not None:
            raise fails
        return torch.ones(entry.shape)

    place, entries = Destination(to), [Entry(name="x", dtype=torch.float32, shape=(2,))]
    write_model(place, files_of_model(place, entries, {}), made)


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), RuntimeError("x")])
@pytest.mark.parametrize("name", ["w.safetensors", "folder"])
def test_whatever_is_raised_leaves_nothing_but_what_was_there(
    name: str, error: BaseException, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    written(tmp_path / name)
    mine = tmp_path / ".w.safetensors.tmp"  # the user's, who may call a file so
    mine.write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(type(error)):
        written(tmp_path / name, fails=error)
    written(tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_a_kill_has_left_goes_after_an_hour(tmp_path: Path) -> None:
    old, young = (tmp_path / f".w.safetensors.{word}.autopar-tmp" for word in ("0" * 8, "1" * 8))
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))
    written(tmp_path / "w.safetensors")
    assert (old.exists(), young.exists()) == (False, True)


def test_a_file_that_has_come_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="autopar has not exported it"):
        written(path)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(path.name, b"mine")]


@pytest.mark.parametrize(
    ("text", "is_file"),
    [("w.bin", True), ("a/w.json", True), ("s3://b/w.pt", True), ("w.bin/", False),
     ("out", False), ("llama-3.1", False), ("gpt2-0.5b", False), (".", False), ("../a.b/c", False),
     ("w.safetensors", False), ("s3://b.c/run", False)],
)  # fmt: skip
def test_a_place_is_called_a_file_by_its_ending(text: str, is_file: bool, tmp_path: Path) -> None:
    assert is_named_as_file(text, except_ending=".safetensors") == is_file
    (tmp_path / "there.d").mkdir()
    assert not is_named_as_file(str(tmp_path / "there.d"))
