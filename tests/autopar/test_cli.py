"""How the command line ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import cli
from autopar.cli import FUNCTIONS
from autopar.planner.errors import ExitCode
from autopar.runtime.checkpointing import signals
from autopar.runtime.ranks import leaving
from tests.autopar.commands import Autopar, run


def test_an_interrupted_command_says_so_and_leaves_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.options.request_of", pressed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autopar", "plan", "model.py", "--gpus", "2", "-o", "o"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_a_torch_that_cannot_be_imported_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def importing(*_: object, **__: object) -> None:
        code = compile("raise OSError('libcudart.so.12: cannot open it')", "torch", "exec")
        exec(code, {"__name__": "torch"})

    monkeypatch.setattr("autopar.options.request_of", importing)
    ran = run(monkeypatch, capsys, "plan", "model.py", "--gpus", "2", "-o", str(tmp_path))
    assert ran.code == 6
    assert ran.err.startswith("error: torch cannot be imported: OSError: libcudart.so.12: cannot")


def test_a_working_directory_that_was_removed_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = run(monkeypatch, capsys, "plan", "../model.py", "--gpus", "2")
    assert ran.code == 2
    assert ran.err.startswith("error: the working directory has been removed\n")


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_command_refuses_an_unknown_option_in_one_message(
    autopar: Autopar, command: str
) -> None:
    ran = autopar(command, "--unknown")
    assert (ran.code, ran.out) == (2, "")
    head, place, fix = ran.err.splitlines()
    assert head == "error: there is no option --unknown"
    assert place.startswith("  at: ")
    assert place.endswith(f" {command}")
    assert fix.startswith("  fix: ")
    assert f"{command} --help lists" in fix


@pytest.mark.parametrize(
    ("word", "fix"), [("pln", "did you mean 'plan'?"), ("zzz", "known are inspect, plan, explain")]
)
def test_a_command_that_is_not_there_is_told(autopar: Autopar, word: str, fix: str) -> None:
    ran = autopar(word, "model.py")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: there is no command {word!r}\n")
    assert fix in ran.err


def test_no_command_shows_all_of_them_and_is_bad_usage(autopar: Autopar) -> None:
    ran = autopar()
    assert (ran.code, ran.err) == (2, "")
    assert all(name in ran.out for name in FUNCTIONS)


def test_the_documented_exit_codes_are_those_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)] == list(ExitCode)
    assert (leaving.USAGE, leaving.MISMATCH) == (ExitCode.USAGE, ExitCode.MISMATCH)
    assert signals.PREEMPTED == ExitCode.PREEMPTED


@pytest.mark.usefixtures("forked_python")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_output_that_has_no_room_is_told_in_one_message() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autopar", "doctor", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: No space left on device")
    assert "Traceback" not in done.stderr
