"""Runs what a model checkpoints by itself as if it did not, and notes where it does.

The plan chooses which layers run again. What a model computes again besides, `autopar plan` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint

from autopar.planner.trace.frames import calling_place

_AROUND_A_FORWARD = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # of torch 2.15
)


@contextmanager
def own_checkpoints_noted() -> Iterator[list[str]]:
    """Gather `file:line` of the model wherever it has torch compute something again."""
    places: list[str] = []

    def around(*_: Any, **__: Any) -> Iterator[None]:
        places.append(calling_place())
        yield

    class Reentrant:
        """In the place of the Function, whose forward keeps no graph."""

        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            places.append(calling_place())
            return function(*args)

    with ExitStack() as patches:
        patches.enter_context(patch.object(checkpoint, "CheckpointFunction", Reentrant))
        for name in _AROUND_A_FORWARD:
            if hasattr(checkpoint, name):
                patches.enter_context(patch.object(checkpoint, name, around))
        yield places
