"""The function that runs is found behind what stands for it, and so is the code inside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.model.functions import DATA_READS, nested_code, plain_function


class Called:
    """Objects that are called, and have a method."""

    def __call__(self, x: int) -> int:
        return x

    def method(self, x: int) -> int:
        return x


def function(x: int) -> int:
    """Return a number as it is."""
    return x


@wraps(function)
def wrapping(x: int) -> int:
    """Stand for the function."""
    return function(x)


@pytest.mark.parametrize(
    ("called", "plain"),
    [
        (function, function),
        (partial(partial(function), 1), function),
        (wrapping, function),
        (lru_cache(function), function),
        (partial(Called().method, 1), Called.method),
        (Called(), Called.__call__),
        (partial(Called()), Called.__call__),
        (len, len),
    ],
)
def test_the_function_of_python_that_runs_is_found(called: Any, plain: Callable[..., Any]) -> None:
    assert plain_function(called) is plain


def test_code_inside_a_function_is_found_at_any_depth() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return lambda: None

        return inner

    assert [code.co_name for code in nested_code(outer.__code__)] == ["outer", "inner", "<lambda>"]


def test_a_model_may_list_a_folder_by_the_number_of_its_open_file(tmp_path: Path) -> None:
    (tmp_path / "rows").touch()
    number = os.open(tmp_path, os.O_RDONLY)
    with DATA_READS.watched():
        listed = os.listdir(number)  # noqa: PTH208  filelock does so when torch.compile begins
    assert listed == ["rows"]
    os.close(number)
