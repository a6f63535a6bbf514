"""The examples in the help of every command are commands that work."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli import FUNCTIONS, LazyCommands
from autopar.planner.plan.declared.settings import DemandOptions
from autopar.planner.plan.files.cache import PLACE
from tests.autopar.commands import run

# Those that are quick, each after the one that makes what it reads.
RUN = ("doctor", "inspect", "plan", "explain", "emit", "diff")


def example(command: str) -> list[str]:
    """Return the words of the example in a command's help, without `autopar` and its name."""
    text = " ".join((LazyCommands()[command].help or "").split())
    found = re.search(rf"Example: autopar {command}\b ?(.*)$", text)
    assert found, f"the help of {command} has no example at its end"
    return shlex.split(found[1])


@pytest.mark.parametrize("command", FUNCTIONS)
def test_the_example_of_a_command_is_understood_to_its_last_word(command: str) -> None:
    found, words = LazyCommands()[command], example(command)
    while hasattr(found, "commands"):  # several under one name, each with an example
        found, words = found.commands[words[0]], words[1:]
    assert not found.make_context(command, words).args


def test_the_model_of_the_example_of_verify_is_one_that_can_be_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = example("verify")
    smaller = [word for word in words if "=" in word]
    gpt2 = str(Path(autopar.__file__).parent / "models_zoo" / "gpt2.py")
    arguments = [part for text in ("size=124m", *smaller) for part in ("--arg", text)]
    ran = run(monkeypatch, capsys, "inspect", gpt2, *arguments)
    assert (ran.code, ran.err) == (0, "")


def test_the_examples_run_one_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))  # they read one model
    Path("models_zoo").symlink_to(Path(autopar.__file__).parent / "models_zoo")
    for folder in ("before", "after"):
        Path(folder).symlink_to("out")
    for command in RUN:
        ran = run(monkeypatch, capsys, command, *example(command))
        assert ran.code == 0, command
        expected = ("note: 50,257", "note: layers are compiled by torch.compile")
        assert not [line for line in ran.err.splitlines() if not line.startswith(expected)]
        assert ran.out
    written = {"out/plan.json", "out/train.py", "train.py"}
    assert all(Path(name).is_file() for name in written)


def test_plan_has_an_option_for_each_demand() -> None:
    options = {one.name: one for one in LazyCommands()["plan"].params}
    assert set(DemandOptions.__annotations__) <= options.keys()
    assert options["max_tp"].opts == ["--max-tp"]
