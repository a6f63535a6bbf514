"""Starts Python programs that have torch already: forks, where a test would start this Python anew.

A program that imports torch and what scripts need takes three seconds until its first line. Here a
server that has imported them forks it, as a child of this process; programs that it starts itself,
such as the ranks of torchrun, are forked from it. Each has its own process, streams, environment,
folder, signals and exit code. What differs: /proc shows the server's command and environment, and
modules of autopar are those of the server, wherever the program lies.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from multiprocessing import get_context, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from tests.runtime.processes import PRELOADED

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_KINDS = ("-m", "-c")
_POPEN: Any = subprocess.Popen
_execute = _POPEN._execute_child
_CALL = inspect.signature(_execute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the command line of Python says, and what it is started with."""

    words: tuple[str, ...]  # without the name of Python and without -u
    environment: Mapping[str, str]
    folder: str
    has_own_session: bool
    before: Callable[[], None] | None

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Program | None:
        """Return the program of a call of Popen; None if it is none that can be forked."""
        args = call["args"]
        if isinstance(args, str) or call["shell"] or call["pass_fds"]:
            return None
        first, *words = (os.fspath(word) for word in args)
        while words and words[0] == "-u":
            del words[0]
        if first != sys.executable or not words or not _is_known(words[0]):
            return None
        given = os.environ if call["env"] is None else call["env"]
        return cls(
            words=tuple(words),
            environment=dict(given),
            folder=str(Path(call["cwd"] or ".").absolute()),
            has_own_session=call["start_new_session"],
            before=call["preexec_fn"],
        )


_Fork = Callable[[Program, list[int]], int]


def _is_known(word: str) -> bool:
    return word in _KINDS or not word.startswith("-")


@contextmanager
def warm_python() -> Iterator[None]:
    """Fork Python programs instead of starting them (on Linux)."""
    if sys.platform != "linux":
        yield
        return
    ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    _POPEN._execute_child = _forked
    try:
        yield
    finally:
        _POPEN._execute_child = _execute


def _forked(self: Any, *given: Any, fork: _Fork | None = None, **named: Any) -> None:
    """Stand in for Popen._execute_child."""
    call = _CALL.bind(self, *given, **named).arguments
    program = Program.of(call)
    if program is None:
        _execute(self, *given, **named)
        return
    files = [
        own if call[name] == -1 else call[name]
        for own, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    self.pid = (fork or _fork_by_server)(program, files)
    self._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(call[name] for name in ends))


def _fork(program: Program, files: list[int]) -> int:
    number = os.fork()
    if number == 0:
        _run(program, files)
    return number


def _fork_by_server(program: Program, files: list[int]) -> int:
    """Return the process, which is a child of this one as soon as the process between has ended."""
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    here, there = context.Pipe(duplex=False)
    ends = [Connection(os.dup(one)) for one in files]
    between = context.Process(target=_fork_from_server, args=(program, ends, there))
    between.start()
    there.close()
    number: int = here.recv()
    between.join()
    return number


def _fork_from_server(program: Program, files: list[Connection], answer: Connection) -> None:
    own = os.getpid()
    number = os.fork()
    if number == 0:
        while os.getppid() == own:  # until the one who asked is the parent
            time.sleep(0.001)
        _run(program, [one.fileno() for one in files])
    answer.send(number)


def _run(program: Program, files: list[int]) -> NoReturn:
    """Be the program, in a process that was just forked."""
    code = 1
    try:
        gc.freeze()  # what the process before has must not be closed, nor deleted, by this one
        _POPEN._execute_child = partialmethod(_forked, fork=_fork)
        _take_over(program, files)
        code = _code_of(program.words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _take_over(program: Program, files: list[int]) -> None:
    """Have what a new process has: streams, signals, folder, environment, nothing to do at exit."""
    own = [os.dup(one) for one in files]
    for number, one in enumerate(own):
        os.dup2(one, number)
    os.closerange(len(own), max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1)
    for one in signal.valid_signals():
        if callable(signal.getsignal(one)):
            signal.signal(one, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    vars(weakref.finalize)["_registry"].clear()
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # closed above
    if program.has_own_session:
        os.setsid()
    if program.before is not None:
        program.before()
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", write_through=True)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.excepthook = sys.__excepthook__
    # torchrun names its loggers after their callers: a search through all modules for each of these
    inspect.modulesbyfile |= {"<frozen runpy>": "runpy", "<string>": "__main__"}


def _code_of(words: tuple[str, ...]) -> int:
    """Run a program to its end and return its exit code."""
    try:
        _run_words(*words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run_words(first: str, *words: str) -> None:
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [one for one in sys.path if one.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, named), *installed]
    if first in _KINDS:
        sys.path.insert(0, "" if first == "-c" else str(Path.cwd()))
        what = words[0]
        sys.argv = [first, *words[1:]]
        if first == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
            return
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(first).resolve().parent))
    sys.argv = [first, *words]
    runpy.run_path(first, run_name="__main__")
