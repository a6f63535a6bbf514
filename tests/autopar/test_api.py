"""autopar as a library does what its commands do."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import autopar
from autopar.planner.plan.files.document import read_plan
from tests.autopar.commands import run
from tests.autopar.mistakes import MODEL

ROOT = Path(__file__).parents[2]
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)[0]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def planned(model: Path, *, pins: Mapping[str, int] | None = None) -> autopar.Plan:
    return autopar.plan(
        model.name, gpus=2, device="cpu", global_batch=8, precision="fp32", pins=pins
    )


@pytest.mark.usefixtures("forked_python")
def test_the_example_of_the_docs_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models_zoo").symlink_to(ROOT / "models_zoo")
    (tmp_path / "example.py").write_text(EXAMPLE)
    runpy.run_path("example.py")
    assert capsys.readouterr().out.startswith("gpt2 (size=tiny) on 2 × cpu: ")
    assert (tmp_path / "out" / "train.py").exists()


def test_a_plan_is_that_of_the_command(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--gpus", "2", "--device", "cpu", "--global-batch", "8", "--precision", "fp32")
    run(monkeypatch, capsys, "plan", "model.py", *options, "--pin", "tp=2", "-o", "by_command")
    script = planned(model, pins={"tp": 2}).write("by_api")
    assert script.read_bytes() == Path("by_command/train.py").read_bytes()
    ours, theirs = (read_plan(Path(name)) for name in ("by_api", "by_command"))
    assert (ours.arrangement, ours.prediction) == (theirs.arrangement, theirs.prediction)


def test_a_plan_is_read_again_and_its_script_written_elsewhere(model: Path) -> None:
    written = planned(model)
    written.write(".")
    again = autopar.load("plan.json")
    assert again.arrangement == written.arrangement
    assert again.emit("other.py").read_text().count("def train_step") == 1


def test_several_numbers_of_devices_are_compared(model: Path) -> None:
    plan = autopar.plan(model.name, gpus=[1, 2], device="cpu", global_batch=8, precision="fp32")
    assert plan.curve is not None
    assert [point.devices for point in plan.curve.points] == [1, 2]


def test_a_script_that_was_changed_by_hand_stays(model: Path) -> None:
    plan = planned(model)
    script = plan.write("out")
    script.write_text(script.read_text() + "# mine\n")
    with pytest.raises(autopar.AutoparError, match="was changed since"):
        plan.write("out")
    plan.write("out", force=True)
    assert "# mine" not in script.read_text()


def test_a_mistake_is_an_error_with_the_text_of_the_command(model: Path) -> None:
    with pytest.raises(autopar.AutoparError, match="'zx81' is not"):
        autopar.plan(model.name, gpus=2, device="zx81")


def test_importing_autopar_imports_no_torch() -> None:
    code = "import autopar, sys; assert 'torch' not in sys.modules; autopar.nothing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'autopar' has no attribute 'nothing'" in ran.stderr
