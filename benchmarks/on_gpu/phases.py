"""Measures how much GPU memory a step holds before, during and after its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch


def memory_of(step: Callable[[], object]) -> Mapping[str, int]:
    """Return the bytes allocated at several points of a step, and the most between two points."""
    found: dict[str, int] = {}
    backward = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        _note(found, "before the backward")
        backward(*args, **kwargs)
        _note(found, "after the backward")

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found["between steps"] = torch.cuda.memory_allocated()
    with patch.object(torch.autograd, "backward", watched):
        step()
    _note(found, "after the step")
    return found


def _note(found: dict[str, int], place: str) -> None:
    found[f"most until {place}"] = torch.cuda.max_memory_allocated()
    found[place] = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
