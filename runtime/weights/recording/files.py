"""Has torch.load map files, so that a process reads no more of them than it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch
from zipfile import is_zipfile

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def loading_maps() -> Iterator[None]:
    """Let torch.load in here map what it can, and make its tensors outside of any recording."""
    original = torch.load

    @wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(f, (str, os.PathLike))
        if is_path and kwargs.get("mmap") is None and is_zipfile(f):
            kwargs["mmap"] = True
        with _disable_current_modes():
            return original(f, *args, **kwargs)

    with patch.object(torch, "load", load):
        yield
