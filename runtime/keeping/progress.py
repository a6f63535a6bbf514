"""Turns logged steps into lines: loss, gradients, time, and how that compares with the plan."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn

from autopar.runtime.data.loss import mean_loss
from autopar.runtime.keeping.numbers import broken_of, told_broken
from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.keeping.pace import Pace
from autopar.runtime.ranks.console import draw_bar, is_terminal, say
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Event, Metrics
from autopar.runtime.ranks.refusal import give_up

GO_ON = "go-on"  # of --on-nan
_BAR_SECONDS = 0.1  # between two bars, which are drawn while the device computes
Planned = tuple[str, float, float]  # the device, seconds of a step on it, MFU


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What is told of the steps since the last line; what is not known is None.

    `memory_bytes` is the most that the first rank has had; `against_plan` the measured seconds of a
    step over the predicted ones.
    """

    step: int
    loss: float
    gradient_norm: float | None
    learning_rate: float | None
    seconds: float
    per_second: float
    unit: str
    memory_bytes: int | None
    mfu: float | None
    against_plan: float | None
    seconds_left: float

    def __str__(self) -> str:
        known = (
            f"step {self.step:>6}   loss {self.loss:.5f}",
            _figure(self.gradient_norm, "norm {:.3g}"),
            _figure(self.learning_rate, "lr {:.3g}"),
            f"{self.seconds * 1e3:,.1f} ms   {self.per_second:,.0f} {self.unit}/s",
            _figure(self.mfu, "MFU {:.1%}"),
            _figure(self.against_plan, "{:.2f} × planned"),
            _figure(self.memory_bytes, "{:.4g} GiB", scale=2**-30),
            f"{timedelta(seconds=round(self.seconds_left))} left" if self.seconds_left else "",
        )
        return "   ".join(text for text in known if text)


class Progress:
    """What the first rank prints while it trains; times are means over the steps since the last.

    Numbers are read from the device at these steps alone.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        mesh: Mesh,
        parts: Sequence[nn.Module],
        learning_rate: Callable[[], float | None],
        metrics: Metrics,
        *,
        amount: int,
        unit: str,
        planned: Planned,
        begun: int,
        scales_loss: bool,
        before_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._mesh, self._parts = options, mesh, parts
        self._learning_rate = learning_rate
        self._amount, self._unit, self._planned = amount, unit, planned
        self._metrics, self._pace = metrics, Pace(mesh)
        self._step, self._begun = begun, time.perf_counter()
        self._before: tuple[int, float] | None = None  # the last line's step and loss
        self._scales_loss, self._before_stopping = scales_loss, before_stopping
        self._has_bar = mesh.rank == 0 and not options.json and is_terminal(sys.stdout)
        self._drawn = 0.0

    def log(self, step: int, own_loss: Tensor, norm: Tensor) -> float:
        """Tell a step and return its loss; leave where it is no number, unless that may be."""
        loss = mean_loss(own_loss, self._mesh)
        clipped = float(norm) if self._options.clip else None
        steps = step - self._step
        line = self._line(step, loss, clipped)
        self._tell(line)
        self._tell_slow(steps, line.seconds, step)
        is_sound = math.isfinite(loss) and (self._scales_loss or math.isfinite(clipped or 0.0))
        was_sound = self._before is None or math.isfinite(self._before[1])
        # fp16 leaves a step out that overflows, and goes on: only a second line tells.
        if not is_sound and not (self._scales_loss and was_sound):
            self._stop(step, loss, own_loss, clipped)
        self._before = step, loss
        return loss

    def show(self, step: int) -> None:
        """Draw on a terminal how far the training is, by the time of steps alone: no rank waits."""
        if not self._has_bar or step in (self._step, self._options.steps):
            return
        now = time.perf_counter()
        if now - self._drawn >= _BAR_SECONDS:
            self._drawn, pace = now, (now - self._begun) / (step - self._step)
            draw_bar(step, self._options.steps, (self._options.steps - step) * pace)

    def leave_out(self, seconds: float) -> None:
        """Count what has just been done for so long as no part of a step."""
        self._begun += seconds

    def _line(self, step: int, loss: float, norm: float | None) -> StepLine:
        now = time.perf_counter()
        seconds = (now - self._begun) / (step - self._step)
        self._step, self._begun = step, now
        device, planned_seconds, planned_mfu = self._planned
        is_as_planned = (device == "cpu") == (self._mesh.device.type == "cpu")
        against = seconds / planned_seconds if is_as_planned else None
        return StepLine(
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=self._learning_rate(),
            seconds=seconds,
            per_second=self._amount / seconds,
            unit=self._unit,
            memory_bytes=_memory(self._mesh.device),
            mfu=None if against is None or device == "cpu" else planned_mfu / against,
            against_plan=against,
            seconds_left=(self._options.steps - step) * seconds,
        )

    def _tell(self, line: StepLine) -> None:
        data = asdict(line)
        self._metrics.add(**data)
        if self._mesh.rank == 0:
            say(json.dumps(data) if self._options.json else line, sys.stdout)

    def _tell_slow(self, steps: int, seconds: float, step: int) -> None:
        for one in self._pace.slow_ranks(steps, seconds):
            self._metrics.add(event=Event.SLOW, step=step, **asdict(one))
            if self._mesh.rank == 0:
                say(f"note: {one}")

    def _stop(self, step: int, loss: float, own_loss: Tensor, norm: float | None) -> None:
        """End the training on all ranks, and say where it went wrong; or let it go on."""
        if self._options.on_nan == GO_ON:
            return
        self._before_stopping()
        is_own = not math.isfinite(float(own_loss))
        ranks = every_rank((is_own, broken_of(self._parts)), self._mesh)
        found = [str(rank) for rank, (is_its, _) in enumerate(ranks) if is_its]
        where = f" on rank {', '.join(found)}" if found else ""
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        before = "" if self._before is None else f"; the loss of step {self._before[0]} was "
        before += "" if self._before is None else f"{self._before[1]:.5f}"
        told = f"{what} in step {step}{where}{before}; {told_broken([one for _, one in ranks])}"
        self._metrics.add(event=Event.STOPPED, step=step, why=told)
        give_up(
            told,
            fix="a lower --lr, or a scheduler that warms up; if --dtype float32 trains, 16 bits "
            "are too few; else look for rows that have no targets; --on-nan go-on trains on",
        )


def _memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def _figure(value: float | None, form: str, *, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)
