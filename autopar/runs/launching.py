"""Starts a training under torchrun, and reports how and why it ended."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.planner.errors import ExitCode, InputError
from autopar.planner.files import read_given
from autopar.runs.run_folder import LOGS, Nodes
from autopar.runs.run_metrics import has_finished, last_event, last_step, lines_of
from autopar.runs.run_record import EXIT_CODES, RECORD, RunRecord, RunState, write_record
from autopar.runtime.ranks.leaving import RUN_TOKEN, VERDICT
from autopar.runtime.ranks.mesh import stop_with_parent
from autopar.runtime.ranks.metrics import Event


def check_rendezvous(nodes: Nodes) -> None:
    """Raise InputError if the first machine is not found, or its port is in use.

    torchrun would search a missing host for minutes, and report a port in use with a traceback.
    """
    if nodes.address is None:
        return
    try:
        socket.getaddrinfo(nodes.address, nodes.port)
    except OSError as error:
        raise InputError(
            f"--master-addr {nodes.address} is not found from this machine: {error.strerror}",
            fix="give the first machine's name or address as the others see it",
        ) from None
    if nodes.rank == 0 and _is_taken(nodes.port):
        raise InputError(
            f"--master-port {nodes.port} is in use on this machine",
            fix="give another one, the same on each machine, or end the program that has it",
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            tried.bind(("", port))
        except OSError:
            return True
    return False


# once a rank has imported the runtime, its stderr goes to its stdout (`join_streams`)
_LOGS = ("stdout.log", "stderr.log")
_COARSE_SECONDS = 1.0  # a file's time may be this much older than the clock
_END_BYTES = 2**17  # read from the end of a log
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_RAISED = re.compile(r"(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)")
_TRACEBACK = "Traceback (most recent call last):"


class RankVerdict(BaseModel):
    """The reason why a rank exited: message, exit code and time."""

    model_config = ConfigDict(strict=True, frozen=True, str_max_length=10_000)

    time: float
    code: int
    found: str
    fix: str

    @property
    def exit_code(self) -> ExitCode:
        """The exit code as autopar's: USAGE, MISMATCH, or else TRAINING_FAILED."""
        known = (ExitCode.USAGE, ExitCode.MISMATCH)
        return ExitCode(self.code) if self.code in known else ExitCode.TRAINING_FAILED


def first_verdict(ranks: Sequence[Path]) -> RankVerdict | None:
    """Return the verdict of the first rank that exited with one, if any."""
    said = [one for folder in ranks if (one := _read(folder / VERDICT)) is not None]
    return min(said, key=lambda one: one.time, default=None)


def first_error(ranks: Sequence[Path]) -> str:
    """Return the error of the rank whose log ended first, in one line, or ""."""
    logs = [folder / name for folder in ranks for name in _LOGS]
    ended = sorted((one for one in logs if one.is_file()), key=lambda one: one.stat().st_mtime)
    return next((line for log in ended if (line := _raised_in(log))), "")


def last_ranks(logs: Path, *, since: float) -> Iterator[Path]:
    """Yield the log folders of the ranks that were started last, since a time."""
    for run in logs.iterdir() if logs.is_dir() else ():
        attempts = [
            (int(found[1]), one) for one in run.glob("*") if (found := _ATTEMPT.fullmatch(one.name))
        ]
        if attempts and max(attempts)[1].stat().st_mtime >= since - _COARSE_SECONDS:
            yield from (one for one in sorted(max(attempts)[1].iterdir()) if one.is_dir())


def _read(path: Path) -> RankVerdict | None:
    if not path.is_file():
        return None
    try:
        return RankVerdict.model_validate_json(read_given(path, what="what a rank left"))
    except (InputError, ValidationError):
        return None


def _raised_in(log: Path) -> str:
    """Return the error of the last traceback in a log, or ""."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _END_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    begun = next((n for n in range(len(lines) - 1, -1, -1) if _TRACEBACK in lines[n]), None)
    if begun is None:
        return ""
    return next((found[1] for line in lines[begun:] if (found := _RAISED.fullmatch(line))), "")


_UNFINISHED = "the script ended without an error, but did not train to its end"
_UNFINISHED_FIX = "look in the model file or the dataset for code that ends the process (sys.exit)"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a run: state and reason; `last` names the last step in words."""

    state: RunState
    code: ExitCode
    last: str
    why: str | None = None
    fix: str = ""
    leftovers: int = 0  # processes that outlived torchrun


def recorded(folder: Path, record: RunRecord, nodes: Nodes, train: Callable[[], End]) -> End:
    """Write the run's record, train, and write the result into the record, even after an error."""
    name = f"node-{nodes.rank}.json" if nodes.rank else RECORD
    write_record(folder, record, name=name)
    state, why = RunState.INTERRUPTED, None  # stays if a signal comes before torchrun starts
    try:
        end = train()
        state, why = end.state, end.why
    except Exception as error:
        state, why = RunState.FAILED, str(error)
        raise
    finally:
        ended = replace(record, state=state, why=why, ended_at=time.time())
        write_record(folder, ended, name=name)
    return end


def run_training(command: Sequence[str], folder: Path, metrics: Path, nodes: Nodes) -> End:
    """Run torchrun for the run in a folder, and return how it ended."""
    seen, since = (metrics.stat().st_size if metrics.is_file() else 0), time.time()
    ended = launch(command)
    for log in (folder / LOGS).rglob("*.log"):
        log.chmod(0o600)
    lines = lines_of(metrics, start=seen)
    has_metrics = nodes.rank == 0 or metrics.is_file()  # the first rank may be on another machine
    state = ended_as(ended, lines if has_metrics else None)
    step = last_step(lines)
    end = End(
        state=state,
        code=EXIT_CODES[state],
        last=f"after step {step['step']:,}" if step else "before its first logged step",
        leftovers=ended.leftovers,
    )
    return _with_reason(end, ended, lines, folder, since) if state is RunState.FAILED else end


def ended_as(ended: ProcessEnd, lines: Sequence[dict[str, Any]] | None) -> RunState:
    """Return the final state of a run, from torchrun's end and the metrics since the start.

    Metrics tell whether the training was finished or preempted. They are None if another machine
    has them; then only torchrun's exit code is known.
    """
    if ended.code == 0:
        is_finished = lines is None or has_finished(lines)
        return RunState.FINISHED if is_finished else RunState.FAILED
    if lines is not None and last_event(lines) == Event.PREEMPTED:
        return RunState.PREEMPTED
    return RunState.INTERRUPTED if ended.is_signalled else RunState.FAILED


def _with_reason(
    end: End, ended: ProcessEnd, lines: Sequence[dict[str, Any]], folder: Path, since: float
) -> End:
    """Return the end of a failed run, with the message of its ranks."""
    ranks = tuple(last_ranks(folder / LOGS, since=since))
    verdict = first_verdict(ranks)
    if verdict is not None and verdict.exit_code is not ExitCode.TRAINING_FAILED:
        return replace(end, code=verdict.exit_code, why=verdict.found, fix=verdict.fix)
    if ended.code == 0:
        return replace(end, why=_UNFINISHED, fix=_UNFINISHED_FIX)
    stopped = lines[-1].get("why") if last_event(lines) == Event.STOPPED else None
    why = stopped or (verdict.found if verdict is not None else first_error(ranks))
    found = f"the training failed {end.last}" + (f": {why}" if why else "")
    return replace(end, why=found, fix=verdict.fix if verdict is not None else "")


_KEEPING_SECONDS = 600  # for a checkpoint after a signal; torchrun's default of 30 s is too short
_GRACE_SECONDS = 30
_POLL_SECONDS = 0.1
# Passed to torchrun as SIGTERM: SIGUSR1 would kill it, and after Ctrl-C it saves no checkpoint.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
# Environment variables of torchrun: the time for ranks to stop, and the prefix of their lines.
ENVIRONMENT: Mapping[str, str] = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_KEEPING_SECONDS),
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a torchrun process."""

    code: int
    is_signalled: bool  # this process got a signal
    leftovers: int  # ranks that outlived torchrun and were killed


def torchrun_text(arguments: Sequence[str]) -> str:
    """Return the command as a person would type it."""
    return shlex.join(["torchrun", *arguments])


def launch(arguments: Sequence[str]) -> ProcessEnd:
    """Run torchrun, as a module of this Python, until it ends."""
    token = uuid4().hex
    environment = {**ENVIRONMENT, **os.environ, RUN_TOKEN: token}
    command = [sys.executable, *TORCHRUN, *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # so that a terminal's Ctrl-C does not reach the ranks
        preexec_fn=stop_with_parent,
    )
    with _passing_on(process, token) as signals:
        code = process.wait()
        leftovers = _end_leftovers(token)
    return ProcessEnd(code=code, is_signalled=bool(signals), leftovers=leftovers)


TORCHRUN = ("-c", f"from {__name__} import be_torchrun; be_torchrun()")


def be_torchrun() -> None:
    """Run torchrun in this process, and ignore all signals but the first.

    After a second signal torchrun would never end. It often gets two: one from the scheduler, and
    the same passed on by `autopar run`.
    """
    from torch.distributed.run import main

    install, got = signal.signal, list[int]()

    def install_once(number: int, handler: Any) -> Any:
        def act(number: int, frame: FrameType | None) -> None:
            got.append(number)
            if len(got) == 1:
                handler(number, frame)

        return install(number, act if callable(handler) else handler)

    vars(signal)["signal"] = install_once
    sys.argv[0] = "torchrun"
    main()


def script_help(script: Path) -> int:
    """Run a script's --help and return its exit code."""
    return subprocess.run([sys.executable, str(script), "--help"], check=False).returncode


@contextmanager
def _passing_on(process: subprocess.Popen[Any], token: str) -> Iterator[list[int]]:
    """Pass the first signal to torchrun as SIGTERM; a second signal kills all ranks."""
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
    """End the processes of a run that outlived torchrun, and return their number."""
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
    """Return the processes with the token in their environment (Linux only)."""
    mark, found = f"{RUN_TOKEN}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # a process of another user, or one that has ended
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
