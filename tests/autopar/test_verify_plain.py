"""`autopar verify --plain` writes a loop for one device, and nothing over a changed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.plan.files.document import write_plan
from tests.autopar.commands import Autopar
from tests.codegen.plans import pinned_plan
from tests.planner.subjects import ZOO

GIVEN = ("--model", str(ZOO / "gpt2.py"), "--plain")


@pytest.mark.usefixtures("forked_python", "traced_once")
def test_the_loop_runs_without_autopar_and_is_never_written_over(
    autopar: Autopar, tmp_path: Path
) -> None:
    plan = pinned_plan("gpt2.py", (), data=2)
    write_plan(plan, tmp_path / "plan.json")
    script = write_script(plan, tmp_path)
    script.write_text(script.read_text().replace("CLIP_NORM = 1.0", "CLIP_NORM = 0.5"), "utf-8")
    ran = autopar("verify", str(tmp_path), *GIVEN)
    loop = tmp_path / "plain.py"
    assert ran.code == 0, ran.err
    assert ran.out == f"Written: {loop}\n"
    text = loop.read_text(encoding="utf-8")
    assert "CLIP_NORM = 0.5" in text

    forbidding = "import sys; sys.modules['autopar'] = None; sys.argv = ['plain.py', '2']; "
    forbidding += f"import runpy; runpy.run_path({str(loop)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", forbidding], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["step", "1"], ["step", "2"]]

    assert autopar("verify", str(tmp_path), *GIVEN).code == 0, "as it was written"
    loop.write_text(text + "# mine\n", encoding="utf-8")
    ran = autopar("verify", str(tmp_path), *GIVEN)
    assert ran.code == 2
    assert "changed since" in ran.err
    assert "move it away" in ran.err


def test_a_loop_is_of_the_plan_and_of_no_smaller_model(autopar: Autopar, tmp_path: Path) -> None:
    plan = pinned_plan("gpt2.py", (), data=2)
    write_plan(plan, tmp_path / "plan.json")
    write_script(plan, tmp_path)
    ran = autopar("verify", str(tmp_path), *GIVEN, "--arg", "layers=1")
    assert ran.code == 2
    assert "--plain and --arg do not go together" in ran.err
