"""Finds forwards that read the sizes of tensors: numbers in their traces may be such sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from autopar.planner.model.functions import nested_code, plain_function

_READING = frozenset({"shape", "size", "numel", "nelement", "len"})


def reads_sizes(forward: Callable[..., Any], owner: type) -> bool:
    """Whether a forward reads a size, or a method or function of the user's that it names does."""
    waiting, met = [plain_function(forward)], set[CodeType]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function.__code__ in met:
            continue
        met.add(function.__code__)
        names = {name for code in nested_code(function.__code__) for name in code.co_names}
        if names & _READING:
            return True
        waiting += [found for name in names for found in _meant(name, function, owner)]
    return False


def _meant(name: str, function: FunctionType, owner: type) -> Iterator[Any]:
    """Yield what a name in a function may mean, if it is not torch's: a method or a global."""
    method = inspect.getattr_static(owner, name, None)
    for found in (getattr(method, "__func__", method), function.__globals__.get(name)):
        if not str(getattr(found, "__module__", "torch")).startswith("torch"):
            yield inspect.unwrap(found) if isinstance(found, FunctionType) else found
