"""Results are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from autopar.planner.files import write_whole


def test_what_is_written_is_there_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "train.py"
    write_whole(path, "text", what="the script")
    assert path.read_text() == "text"
    assert [one.name for one in path.parent.iterdir()] == ["train.py"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    write_whole(path, "old", what="the script")

    def full(_from: Path, _to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="the script cannot be written: No space left on device"):
        write_whole(path, "new", what="the script")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("train.py", "old")]


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text("old")
    link.symlink_to(path)
    write_whole(link, "new", what="the script")
    assert link.is_symlink()
    assert path.read_text() == "new"
    write_whole(Path("/dev/null"), "text", what="the script")
    assert Path("/dev/null").is_char_device()
