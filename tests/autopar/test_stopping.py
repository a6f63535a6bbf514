"""A command that is told to end in its first seconds ends as by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cells import cells

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="/proc is of Linux")


def catches(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", cells((signal.SIGTERM, signal.SIGHUP), [signal.SIGTERM]))
def test_a_signal_in_the_first_seconds_leaves_with_130(number: int, tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "autopar", "run", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not catches(command.pid, number) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(command.pid, number)
    error = command.communicate(timeout=60)[1]
    assert command.returncode == 130
    assert error.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in error


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it to a command
    try:
        command = subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", str(tmp_path)], stderr=subprocess.PIPE
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    deadline = time.monotonic() + 60
    while not catches(command.pid, signal.SIGTERM) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(command.pid, signal.SIGHUP)
    command.communicate(timeout=60)
    assert command.returncode == 2, "there is no plan in that folder"
