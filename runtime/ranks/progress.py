"""Turns logged steps into lines: loss, time of a step, and how much it trains on in a second."""

import argparse
import json
import math
import time

from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Metrics
from autopar.runtime.ranks.refusal import refuse


class Progress:
    """What the first rank prints while it trains; times are means over the steps since the last."""

    def __init__(
        self, options: argparse.Namespace, mesh: Mesh, amount: int, unit: str, *, begun: int = 0
    ) -> None:
        self._is_printing = mesh.rank == 0
        self._amount, self._unit, self._as_json = amount, unit, options.json
        self._metrics = Metrics(options.metrics, mesh)
        self._step, self._begun = begun, time.perf_counter()
        self._was_finite = True

    def log(self, step: int, loss: float) -> None:
        """Print one line, as text or as JSON; leave where no loss has come since the last line."""
        self._print(step, loss)
        is_finite = math.isfinite(loss)
        if not is_finite and not self._was_finite:
            refuse(
                f"the loss is {loss} in step {step}, and was no number in the line before",
                fix="a lower --lr, or a scheduler that warms up; if --dtype float32 trains, 16 "
                "bits are too few; else look for rows that have no targets",
            )
        self._was_finite = is_finite  # fp16 skips a step that overflows, and goes on

    def _print(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        seconds = (now - self._begun) / (step - self._step)
        self._step, self._begun = step, now
        self._metrics.add(step=step, loss=loss, seconds=seconds)
        if not self._is_printing:
            return
        if self._as_json:
            print(json.dumps({"step": step, "loss": loss, "seconds": seconds}), flush=True)
            return
        rate = f"{self._amount / seconds:,.0f} {self._unit}/s"
        print(f"step {step:>6}   loss {loss:.5f}   {seconds * 1e3:,.1f} ms   {rate}", flush=True)
