"""Signals that ask a training to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from autopar.runtime.checkpointing.signals import StopSignals
from autopar.runtime.ranks.leaving import FAILED
from autopar.runtime.ranks.mesh import Mesh, start
from tests.runtime.processes import run_on_ranks


def test_a_signal_is_a_wish_and_those_who_had_it_before_get_it_back(mesh: Mesh) -> None:
    before, wish = signal.getsignal(signal.SIGUSR1), StopSignals(mesh)
    wish.listen()
    assert not wish.ask(1).stops
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)  # as schedulers do, which is no second wish
    assert any(wish.ask(step).stops for step in range(2, 2000))
    wish.restore_handlers()
    assert signal.getsignal(signal.SIGUSR1) is before


def steps_of_wish() -> int:
    """Ask for a stop on one of the ranks; return the step in which this one agrees."""
    mesh = start(pipeline=1, data=2, tensor=1)
    wish = StopSignals(mesh)
    for step in range(1, 5000):
        if step == 7 and mesh.rank == 1:
            wish._note(signal.SIGTERM, None)
        if wish.ask(step).stops:
            return step
    return 0


def test_all_ranks_stop_after_the_same_step() -> None:
    first, second = run_on_ranks(steps_of_wish, 2)
    assert first == second >= 7


SECOND = """
import os, signal, time
from autopar.runtime.checkpointing.signals import StopSignals
from autopar.runtime.ranks.mesh import start
StopSignals(start(pipeline=1, data=1, tensor=1)).listen()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.2)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""


@pytest.mark.usefixtures("forked_python")
def test_a_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], check=False, timeout=60)
    assert done.returncode == -signal.SIGTERM


STUCK = """
import ctypes, os, signal
from autopar.runtime.checkpointing import signals
from autopar.runtime.ranks.mesh import start
signals._LAST_SECONDS = 0.5
signals.StopSignals(start(pipeline=1, data=1, tensor=1)).listen()
os.environ.pop("TORCHELASTIC_RUN_ID")
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
print("waits", flush=True)
library.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it: as a wait for a device
"""


@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_waits_for_a_device_ends_before_torchrun_kills_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED
    assert "rank 0 was asked to stop, and no step has ended for" in said
