"""Removes checkpoints that are kept no longer."""

from __future__ import annotations

from autopar.runtime.keeping.finding import best_of
from autopar.runtime.keeping.step_folders import (
    checkpoints_in,
    give_up,
    remove,
    step_of,
    unfinished_in,
)
from autopar.runtime.ranks.locations import Location


def let_go(folder: Location, keep: int, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints, the best and those that stay, and unfinished ones."""
    every = checkpoints_in(folder)
    best = best_of(every)
    passing = [one for one in every if keep_every is None or step_of(one) % keep_every]
    for old in passing[keep:]:
        if best is None or step_of(old) != best[0]:
            give_up(old)
    for unfinished in unfinished_in(folder):
        remove(unfinished)
