"""Tells which ops draw random numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from autopar.planner.ops import Op

_SWITCHES = ("train", "training")
_CHANCES = ("p", "dropout", "dropout_p")


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers: torch marks it so, and it is not turned off."""
    if not _draws(op.target):
        return False
    arguments = dict(op.arguments)
    is_off = any(arguments.get(name) is False for name in _SWITCHES)
    return not is_off and all(arguments.get(name) != 0.0 for name in _CHANCES)


@lru_cache(maxsize=4096)
def _draws(target: str) -> bool:
    import torch  # seconds, which commands that draw nothing do without

    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(found, "tags", ())
