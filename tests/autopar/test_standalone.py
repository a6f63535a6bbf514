"""`autopar emit --standalone` makes a folder that trains elsewhere, with the model file in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.autopar.commands import Autopar
from tests.autopar.mistakes import MODEL


def test_a_standalone_folder_trains_elsewhere_with_the_model_file_that_it_asks_for(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("model.py").write_text(MODEL, encoding="utf-8")
    machine = ("--gpus", "1", "--device", "cpu", "--precision", "fp32", "--global-batch", "4")
    assert autopar("plan", "model.py", *machine, "-o", "out").code == 0
    ran = autopar("emit", "out", "--standalone", "-o", "alone")
    assert ran.code == 0
    assert "copy alone there, and model.py into it" in ran.out
    shutil.move("alone", there)
    shutil.move("model.py", there)
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "1", "--export", "none"],
        cwd=there,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("step      1   loss")
    assert done.stderr.startswith("checked: the first loss is")
    assert len(done.stderr.splitlines()) == 1
    assert not list(there.rglob("planner"))


def test_all_that_a_model_file_imports_of_its_own_is_asked_for(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "flat/net.py": f"import blocks\n{MODEL}",
        "flat/blocks.py": "",
        "src/inner/__init__.py": "",
        "src/inner/net.py": f"from .blocks import WIDTH\n{MODEL}",
        "src/inner/blocks.py": "WIDTH = 8\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    machine = ("--gpus", "1", "--device", "cpu", "--precision", "fp32", "--global-batch", "4")
    for model, needed in (("flat/net.py", "blocks.py, net.py"), ("src/inner/net.py", "inner")):
        monkeypatch.chdir(tmp_path)
        out = str(tmp_path / f"out-{Path(model).parent.name}" / ("long" * 30))
        assert autopar("plan", model, *machine, "-o", out).code == 0
        monkeypatch.chdir("/")
        ran = autopar("emit", out, "--standalone")
        assert f"there, and {needed} into it" in ran.out


@pytest.mark.parametrize("name", ["__init__.py", "notes.txt", "runtime/ranks/mesh.py"])
def test_a_folder_of_that_name_of_somebody_else_stays(autopar: Autopar, name: str) -> None:
    Path("model.py").write_text(MODEL, encoding="utf-8")
    machine = ("--gpus", "1", "--device", "cpu", "--precision", "fp32", "--global-batch", "4")
    assert autopar("plan", "model.py", *machine, "-o", "out").code == 0
    theirs = Path("autopar") / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine", encoding="utf-8")
    ran = autopar("emit", "out", "--standalone", "--force", "-o", ".")
    assert ran.code == 2
    assert "is in the way" in ran.err
    assert theirs.read_text(encoding="utf-8") == "mine"
    assert not Path("train.py").exists()
