"""A program that is forked from a warm Python ends, and says, what it would if it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import atexit, os, sys
from pathlib import Path
atexit.register(print, "at exit")
print(sys.argv, Path.cwd(), os.environ["WORD"], os.getppid(), __name__, sys.path[0])
sys.exit("refused")
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
IS_WARM = "import sys; print('torch' in sys.modules)"
BOTH = ("started", "forked_python")


@pytest.fixture
def started() -> None:
    """Start programs as always."""


def ran(*words: str, **named: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **named)


@pytest.mark.parametrize("way", BOTH)
def test_a_program_has_its_words_folder_environment_parent_and_code(
    way: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(way)
    script, folder = tmp_path / "program.py", tmp_path / "folder"
    script.write_text(PROGRAM)
    folder.mkdir()
    done = ran("-u", str(script), "one", cwd=folder, env=os.environ | {"WORD": "word"})
    argv = [str(script), "one"]
    own = f"{argv} {folder} word {os.getpid()} __main__ {tmp_path}\nat exit\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, own, "refused\n")


@pytest.mark.parametrize("way", BOTH)
def test_a_program_that_is_killed_says_by_which_signal(
    way: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(way)
    assert ran("-c", KILLED).returncode == -signal.SIGKILL
    assert ran("-c", IS_WARM).stdout == f"{way == 'forked_python'}\n"
