"""Runs parts of the benchmark in this process, without any of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.on_gpu.context import Context, Result


@dataclass(slots=True, kw_only=True)
class Here(Context):
    """A context whose single processes are this one."""

    device: str = "cpu"
    tiny: bool = True

    def on_ranks(
        self, function: Callable[..., Result], ranks: int, *args: Any, seconds: float = 60.0
    ) -> list[Result]:
        """Call a function here."""
        assert ranks == 1
        return [self.fresh(function, *args, seconds=seconds)]

    def fresh(self, function: Callable[..., Result], *args: Any, seconds: float = 60.0) -> Result:
        """Call a function here."""
        del seconds
        with patch.dict(os.environ):
            return function(*args)
