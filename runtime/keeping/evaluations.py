"""Turns what evaluations find into lines, and tells which of them was the best."""

from __future__ import annotations

import argparse
import json
import math
import sys

from autopar.runtime.evaluation.evaluating import Evaluated
from autopar.runtime.keeping.finding import best_of
from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.keeping.step_folders import checkpoints_in, step_of
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Event, Metrics


class Evaluations:
    """What the evaluations of a training have found; all ranks know the same."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh, metrics: Metrics) -> None:
        self._options, self._mesh, self._metrics = options, mesh, metrics
        self._last: tuple[int, float] | None = None  # its step and its loss
        self._best: tuple[int, float] | None = None
        self._since = 0  # evaluations after the best one

    def go_on(self, folder: Location, step: int) -> None:
        """Begin where a training was after a step: its best evaluation has a checkpoint."""
        there = checkpoints_in(folder) if self._mesh.rank == 0 else ()
        before = [one for one in there if step_of(one) <= step]
        self._best = every_rank(best_of(before), self._mesh)[0]
        if self._best is not None and self._options.eval_every:
            every = self._options.eval_every
            self._since = step // every - self._best[0] // every

    def note(self, step: int, found: Evaluated) -> None:
        """Tell what an evaluation has found; one that is no number is never the best."""
        self._last = step, found.loss
        is_best = math.isfinite(found.loss) and (self._best is None or found.loss < self._best[1])
        self._since = 0 if is_best else self._since + 1
        self._best = self._last if is_best else self._best
        self._tell(step, found, is_best=is_best)
        if self.are_over:
            best = self.best_step
            self._metrics.add(event=Event.STOPPED_EARLY, step=step, best_step=best)
            why = "found a number" if best is None else f"was better than that of step {best:,}"
            self._say(f"stopped early after step {step:,}: no evaluation {why}")

    def loss_of(self, step: int) -> float | None:
        """Return what the evaluation after a step has found; None if none, or no number."""
        if self._last is None or self._last[0] != step or not math.isfinite(self._last[1]):
            return None
        return self._last[1]

    @property
    def best_step(self) -> int | None:
        """The step after which the best evaluation was; None before there is one."""
        return None if self._best is None else self._best[0]

    @property
    def are_over(self) -> bool:
        """Whether so many have found nothing better that the training is to stop."""
        most = self._options.early_stop
        return most is not None and self._since >= most

    def _tell(self, step: int, found: Evaluated, *, is_best: bool) -> None:
        data = {
            "event": Event.EVALUATED,
            "step": step,
            "loss": found.loss,
            "metrics": found.metrics,
            "rows": found.rows,
            "seconds": round(found.seconds, 3),
            "is_best": is_best,
        }
        self._metrics.add(**data)
        if self._mesh.rank == 0:
            figures = (
                f"step {step:>6}   evaluation loss {found.loss:.5f}",
                *(f"{name} {value:.5g}" for name, value in found.metrics.items()),
                f"{found.rows:,} rows   {found.seconds:,.1f} s",
                *(["best"] if is_best else []),
            )
            line = "   ".join(figures)
            say(json.dumps(data) if self._options.json else line, sys.stdout)

    def _say(self, text: str) -> None:
        if self._mesh.rank == 0:
            say(text)
