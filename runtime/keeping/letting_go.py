"""Removes checkpoints that are kept no longer."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from autopar.runtime.keeping.finding import best_of, checkpoints_in, step_of
from autopar.runtime.keeping.writing import STEP, UNFINISHED


def let_go(folder: Path, keep: int, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints, the best and those that stay, and unfinished ones."""
    every = checkpoints_in(folder)
    best = best_of(every)
    passing = [one for one in every if keep_every is None or step_of(one) % keep_every]
    for old in passing[keep:]:
        if best is not None and step_of(old) == best[0]:
            continue
        gone = old.with_name(old.name + UNFINISHED)
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):
            old.rename(gone)  # at once: half of it would look broken
    for unfinished in list(folder.glob(f"{STEP}*{UNFINISHED}")):
        shutil.rmtree(unfinished, ignore_errors=True)
