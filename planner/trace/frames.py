"""Finds the user's line and module in a traceback that runs through torch."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

_OWN = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    "<",  # generated code
)


@cache
def is_library_file(filename: str) -> bool:
    """Whether a frame in this file is torch's, Python's or ours, and not the model's."""
    in_packages = "site-packages" in filename or "dist-packages" in filename
    if filename.startswith(_LIBRARIES):
        return not in_packages or filename.startswith(_LIBRARIES[0])
    return str(Path(filename).resolve()).startswith(_OWN)


def failing_place(error: BaseException, model: nn.Module) -> str:
    """Return `file:line, in module path` of the innermost frame of the model's own code."""
    paths = {id(module): path for path, module in model.named_modules()}
    place, module_path = "", ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            module_path = f"{paths[id(owner)]} ({type(owner).__name__})"
        if not is_library_file(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return ", in module ".join(part for part in (place, module_path) if part)


def calling_place() -> str:
    """Return `file:line` of the innermost frame of the model; nothing where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def defined_at(function: Callable[..., Any] | None) -> str:
    """Return file:line of a function's definition, "" where it has none of its own."""
    function = function and inspect.unwrap(function)
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
