"""Finds a model's source files, functions and hooks, and the data that the model reads."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from autopar.planner.model.guard import INIT, import_name, imported_names, replaced

if TYPE_CHECKING:
    from torch import nn

_LIBRARIES = {"autopar", "torch", *sys.stdlib_module_names}


def sources(path: Path) -> list[Path]:
    """Return a file and the files of its folder that it imports, directly or through others."""
    folder, found, waiting = import_name(path).folder, {path}, [path]
    while waiting:
        importing = waiting.pop()
        for name in imported_names(importing):
            module = _place(name, importing, folder)
            for file in (module.with_name(f"{module.name}.py"), module / INIT):
                if file.is_file() and file not in found and folder in file.parents:
                    found.add(file)
                    waiting.append(file)
    return sorted(found)


def _place(name: str, importing: Path, folder: Path) -> Path:
    """Return a module's path, without `.py`.

    One leading dot means the folder of the importing file, each further dot the folder above.
    """
    absolute = name.lstrip(".")
    level = len(name) - len(absolute)
    above = importing.parents[level - 1] if level else folder
    return above.joinpath(*absolute.split(".")) if absolute else above


def loaded_sources(path: Path, classes: Iterable[type] = ()) -> list[ModuleType]:
    """Return the Python modules that contain a model's code, without libraries.

    These are the model's files, and modules that define its classes or that its files import, such
    as the user's own package in editable mode.
    """
    files = set(map(str, sources(path)))
    loaded = list(sys.modules.values())
    home = [one for one in loaded if getattr(one, "__file__", None) in files]
    named = [value for file in home for value in vars(file).values()]
    defined = (one for one in (*classes, *named) if isinstance(one, type | FunctionType))
    names = {one.__module__ for one in defined}
    names |= {one.__name__ for one in named if isinstance(one, ModuleType)}
    elsewhere = (sys.modules[name] for name in sorted(names) if name in sys.modules)
    return [one for one in dict.fromkeys((*home, *elsewhere)) if not _is_library(one)]


def _is_library(module: ModuleType) -> bool:
    file, package = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    is_installed = file is None or "site-packages" in file or "dist-packages" in file
    return is_installed or package in _LIBRARIES


def plain_function(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Python function that a method, a partial or a callable object runs."""
    while isinstance(called, partial):
        called = called.func
    called = inspect.unwrap(called)  # it may be a wrapper object, such as lru_cache's
    if not isinstance(called, FunctionType | MethodType | BuiltinFunctionType):
        called = type(called).__call__
    plain: Callable[..., Any] = inspect.unwrap(getattr(called, "__func__", called))
    return plain


def plain_functions(scope: Mapping[str, Any]) -> list[tuple[str, FunctionType]]:
    """Return the Python functions in a file's globals that can be imported by name, except torch's.

    These are functions that the module which defines them still has under their own names.
    """
    found = [(name, value) for name, value in scope.items() if isinstance(value, FunctionType)]
    return [(name, function) for name, function in found if _is_importable(function)]


def _is_importable(function: FunctionType) -> bool:
    home = str(function.__module__)
    is_torch = home.partition(".")[0] == "torch"
    return not is_torch and getattr(sys.modules.get(home), function.__name__, None) is function


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


# A module's registries of hooks; torch's global registries have these names after `_global`.
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks that run when a module is called, but not when only its forward is called."""
    for name in _FORWARD:
        yield from getattr(module, name).values()


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks of a module change or read gradients."""
    return any(getattr(module, name) for name in _BACKWARD)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return any(forward_hooks(module)) or has_backward_hooks(module)


def global_hooks() -> list[Callable[..., Any]]:
    """Return the hooks that torch runs for every module."""
    from torch.nn.modules import module as torch_module  # imported here, because it takes seconds

    names = (f"_global{name}" for name in (*_FORWARD, *_BACKWARD))
    return [hook for name in names for hook in getattr(torch_module, name).values()]


State = tuple[int, int, int] | None  # of a path: inode, size, time of its last change


def state_of(path: str) -> State:
    """Return the state of a file or folder, None if it is not there."""
    try:
        found = os.stat(path)  # noqa: PTH116 - called for each file that is opened
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class DataReads:
    """The files, folders and environment variables that models read in this process.

    Python tells audit hooks about each file that it opens; a hook cannot be removed, so there is
    one for the whole process. Variables are seen by replacing the lookup of `os.environ` while a
    model runs. Not seen are files that libraries open without Python, and checks whether a file
    exists.
    """

    def __init__(self) -> None:
        self.paths: dict[str, State] = {}  # each with its state when it was last read
        self.variables: dict[str, str | None] = {}
        self._first: set[str] = set()  # variables read since `watched` began
        # the frame that has begun to list all variables, and its instruction
        self._lister: tuple[FrameType, int] | None = None
        self._depth = 0
        self._is_hooked = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what is read within the body."""
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._hook())
        with ExitStack() as patches:
            if not self._depth:
                self._first.clear()
                for name in ("__getitem__", "__iter__"):
                    seen = self._seen(name, getattr(type(os.environ), name))
                    patches.enter_context(replaced(type(os.environ), name, seen))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._lister = None

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        """Return the audit hook, which is quick if nothing is read.

        Python calls it for many other events: millions in a trace of 1,000 layers.
        """
        reads, on_read = frozenset(("open", "os.listdir", "os.scandir")), self._on_read

        def hook(event: str, given: tuple[Any, ...]) -> None:
            if event in reads:
                on_read(event, given)

        return hook

    def _on_read(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._depth:
            return
        path = "." if given[0] is None else given[0]  # os.listdir() lists the working folder
        if not isinstance(path, (str, bytes)):  # the number of an open file or folder
            return
        if event == "open" and given[2] & (os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            return
        if not _is_importing() and _package(_outside_python()) != "autopar":
            place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
            self.paths[place] = state_of(place)

    def _seen(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(environ: Any, variable: str) -> str:
            try:
                value: str = original(environ, variable)
            except KeyError:
                self._on_variable(variable, None)
                raise
            self._on_variable(variable, value)
            return value

        def listed(environ: Any) -> Iterator[str]:
            frame = _outside_python()
            self._lister = (frame, frame.f_lasti)
            names: Iterator[str] = original(environ)
            return names

        return read if name == "__getitem__" else listed

    def _on_variable(self, name: str, value: str | None) -> None:
        """Record a variable's first value: a model may set it afterwards.

        Not recorded are variables that are read only because the code lists all of them, for
        example to copy the environment for another process.
        """
        frame = _outside_python()
        is_listing = self._lister is not None and self._lister == (frame, frame.f_lasti)
        is_library = "site-packages" in frame.f_code.co_filename
        is_of_terminal = is_library and name.startswith(_OF_TERMINALS)
        if _package(frame) in _LIBRARIES or is_listing or is_of_terminal or name in self._first:
            return
        self._first.add(name)
        self.variables[name] = value


DATA_READS = DataReads()
# Variables that differ between windows of a terminal; libraries read them before they print.
_OF_TERMINALS = ("COLUMNS", "LINES", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "TTY_")


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _outside_python() -> FrameType:
    """Return the innermost frame that is neither in this file nor in Python's own modules."""
    return next(one for one in _frames() if not _is_of_python(one))


def _is_importing() -> bool:
    """Whether Python is importing a module; `sources` and `loaded_sources` find its files."""
    inside = takewhile(_is_of_python, _frames())
    return any(_package(one) in ("importlib", "_frozen_importlib") for one in inside)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_python(frame: FrameType) -> bool:
    is_outermost = frame.f_back is None
    is_here = frame.f_globals.get("__name__") == __name__
    return not is_outermost and (is_here or _package(frame) in sys.stdlib_module_names)
