"""Finds what the step of an optimizer or a scheduler sets outside it, and the forward reads.

Code that is printed would keep the value that the trace has seen.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from autopar.planner.errors import InputError
from autopar.planner.model.functions import nested_code
from autopar.planner.model.outside import outside_of


def check_stepped_state(path: Path, model: nn.Module | None, step: Callable[[], Any]) -> None:
    """Run a step, put back what it changes, and refuse what the forward or the loss reads of it.

    The optimizer may have the model, or its last one may be a global of the file.
    """
    outside = outside_of(path, model)
    before = outside.snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()
        changed = before.changes_to(outside.snapshot())
    finally:
        before.put_back()
    read = _names_read(outside.files)
    for place in changed:
        if read.issuperset(re.findall(r"(?:^|\.)(\w+)", place.partition(" of ")[0])):
            raise InputError(
                f"the optimizer's or the scheduler's step sets {place}, which the forward or the "
                "loss reads: printed code would keep one value",
                where=str(path),
                expected="what changes in training to be a buffer of the model",
                fix="count steps in a buffer that forward writes (self.steps += 1), and compute "
                "the value of that",
            )


def _names_read(files: tuple[ModuleType, ...]) -> set[str]:
    """Return the names in the code of the modules of some files, of the loss, and of their help."""
    waiting = [function for file in files for function in _run_in_a_step(file)]
    met, names = set[CodeType](), set[str]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in met:
            continue
        met.add(function.__code__)
        for code in nested_code(function.__code__):
            names |= {*code.co_names, *code.co_freevars}
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        waiting += [one for one in called if isinstance(one, FunctionType)]
    return names


def _run_in_a_step(file: ModuleType) -> Iterator[FunctionType]:
    for name, value in vars(file).items():
        if name == "loss" and isinstance(value, FunctionType):
            yield value
        if isinstance(value, type) and issubclass(value, nn.Module):
            methods = (one for key, one in vars(value).items() if key != "__init__")
            yield from (one for one in methods if isinstance(one, FunctionType))
