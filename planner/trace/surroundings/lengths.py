"""Lets a model ask for the length of a tensor without fixing its number of rows.

Python's own `len` makes a plain number of whatever it is told: `len(x)`, said in place of
`x.shape[0]`, held for the rows of the trace alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

_len = len


@contextmanager
def lengths_as_sizes() -> Iterator[None]:
    """Have `len` of a tensor be its first size, which may be a symbol."""
    with patch.object(builtins, "len", _length):
        yield


def _length(one: Sized, /) -> Any:
    if isinstance(one, Tensor) and type(one).__len__ is Tensor.__len__ and one.ndim:
        return one.shape[0]
    return _len(one)
