"""A command that takes long says what it is at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import pytest

from autopar.codegen.emit import emit_with_notes
from autopar.console import noting_slow_phases
from autopar.planner.errors import InputError
from autopar.planner.model.model_file import import_file


def test_an_import_that_takes_long_is_told_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "slow_model.py"
    path.write_text("import time\ntime.sleep(0.5)\nraise ValueError\n")
    with pytest.raises(InputError), noting_slow_phases(0.2):
        import_file(path)
    told = capsys.readouterr().err
    assert "note: still importing slow_model.py, at line 2 after 0 s; Ctrl-C ends it" in told


# `autopar`, with a first note after half a second.
_SOON = """
from functools import partial
from autopar import cli, console
console.noting_slow_phases = partial(console.noting_slow_phases, 0.5)
cli.main()
"""


@pytest.mark.usefixtures("forked_python")
def test_an_import_that_never_ends_is_ended_by_the_key_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", _SOON, "inspect", "model.py"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        # Tests that run in the background of a shell have the key ignored, and so would this.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as running:
        assert running.stderr is not None
        # on a busy machine, a first note may come before the file runs, and names no line
        first = next(line for line in running.stderr if " at line " in line)
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert first.startswith("note: still importing model.py, at line 3 after")
    assert (running.returncode, rest) == (130, "interrupted\n")


def test_it_is_told_where_people_read_though_the_trace_sends_stderr_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with noting_slow_phases(0.02), redirect_stderr(StringIO()):
        time.sleep(0.5)
    assert "note: still at work after 0 s" in capsys.readouterr().err


def test_a_script_that_takes_long_to_write_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> NoReturn:
        time.sleep(0.5)
        raise InputError("enough")

    monkeypatch.setattr("autopar.codegen.emit.subject_of", slow)
    plan: Any = None
    with pytest.raises(InputError, match="enough"), noting_slow_phases(0.05):
        emit_with_notes(plan, destination=Path("train.py"))
    assert "note: still writing the script after 0 s" in capsys.readouterr().err
