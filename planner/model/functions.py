"""Finds the files of a model's code, the code inside functions, and hooks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from autopar.planner.model.guard import INIT, import_name, imported_names

if TYPE_CHECKING:
    from torch import nn

_LIBRARIES = {"autopar", "torch", *sys.stdlib_module_names}


def sources(path: Path) -> list[Path]:
    """Return a file and the files it imports from its own folder."""
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
    """Return where a module would be; one dot is the file's folder, each further dot goes up."""
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
    called = inspect.unwrap(called)  # of a wrapper object, such as lru_cache's
    if not isinstance(called, FunctionType | MethodType | BuiltinFunctionType):
        called = type(called).__call__
    plain: Callable[..., Any] = inspect.unwrap(getattr(called, "__func__", called))
    return plain


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
    """Yield the hooks that run when a module is called, but not when its forward is."""
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
