"""Turns a torchrun command into its end: signals passed on, no process left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

from autopar.runtime.ranks.leaving import RUN_TOKEN
from autopar.runtime.ranks.parent import stop_with_parent

_KEEPING_SECONDS = 600  # for a checkpoint after a signal; torchrun's own 30 are few
_GRACE_SECONDS = 30
_POLL_SECONDS = 0.1
# torchrun knows neither SIGUSR1, of which it would die, nor that Ctrl-C shall keep what is trained.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
# What is set around torchrun: a rank's lines begin with its number.
ENVIRONMENT: Mapping[str, str] = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_KEEPING_SECONDS),
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How torchrun has ended."""

    code: int
    is_signalled: bool  # this process was told to stop
    leftovers: int  # ranks that outlived torchrun, and were ended


def torchrun_text(arguments: Sequence[str]) -> str:
    """Return the command as a person types it."""
    return shlex.join(["torchrun", *arguments])


def launch(arguments: Sequence[str]) -> Ended:
    """Run torchrun until it ends, as this Python's module."""
    token = uuid4().hex
    environment = {**ENVIRONMENT, **os.environ, RUN_TOKEN: token}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # a terminal sends Ctrl-C to its foreground group: not to ranks
        preexec_fn=stop_with_parent,
    )
    with _passing_on(process, token) as signals:
        code = process.wait()
        leftovers = _end_leftovers(token)
    return Ended(code=code, is_signalled=bool(signals), leftovers=leftovers)


def script_help(script: Path) -> int:
    """Have a script print its options, which its first rank alone does; return its exit code."""
    return subprocess.run([sys.executable, str(script), "--help"], check=False).returncode


@contextmanager
def _passing_on(process: subprocess.Popen[Any], token: str) -> Iterator[list[int]]:
    """Pass signals on to torchrun: the first one as SIGTERM; the second one ends all at once."""
    got: list[int] = []

    def act(number: int, _: FrameType | None) -> None:
        got.append(number)
        if len(got) == 1:
            _say("stopping after this step; a second signal ends all ranks at once")
            process.terminate()
        else:
            process.kill()
            for one in _processes(token):
                _send(one, signal.SIGKILL)

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, act) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_leftovers(token: str) -> int:
    """End the processes of a run that torchrun left, as where it was killed itself."""
    found = _processes(token)
    if not found:
        return 0
    for one in found:
        _send(one, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while _processes(token) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for one in _processes(token):
        _send(one, signal.SIGKILL)
    return len(found)


def _processes(token: str) -> list[int]:
    """Return the processes that have the token in their environment, where /proc tells."""
    mark, found = f"{RUN_TOKEN}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone by now
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
