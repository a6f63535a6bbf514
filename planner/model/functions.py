"""Looks at functions of Python as they are written: what runs, and with which code inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any


def plain_function(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of Python that runs: that of a method, a partial or a callable object."""
    while isinstance(called, partial):
        called = called.func
    called = inspect.unwrap(called)  # of a wrapper that is an object, as lru_cache makes
    if not isinstance(called, FunctionType | MethodType | BuiltinFunctionType):
        called = type(called).__call__
    plain: Callable[..., Any] = inspect.unwrap(getattr(called, "__func__", called))
    return plain


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that are written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)
