"""Prints the progress of a training: step lines, slow ranks, non-finite numbers.

In a step all ranks wait for the slowest one, so step times do not show which one is slow. Instead,
two times are measured on each rank: how long it waits for its rows, and how long it takes for the
same small matrix product between two steps. Slow links are not found.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.checkpointing.owners import named_tensors
from autopar.runtime.data.loss import largest_norm, mean_loss
from autopar.runtime.optimizer.pieces import local_tensor
from autopar.runtime.ranks.leaving import draw_bar, give_up, is_terminal
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Event, Metrics
from autopar.runtime.ranks.transport import every_rank, gathered
from autopar.runtime.ranks.user_code import CPU_BY_FORMULA


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A rank's parameters with nan or inf."""

    count: int
    every: int  # all of the rank's parameters
    first: str  # the name of the first that has nan or inf, or ""


@torch.no_grad()
def broken_of(parts: Sequence[nn.Module]) -> Broken:
    """Count this rank's parameters with nan or, if they are trained, with inf or -inf."""
    named = [
        (one.names[0], local_tensor(one.place.tensor.detach()), one.place.tensor.requires_grad)
        for one in named_tensors(parts)
        if one.is_parameter and one.place.tensor.is_floating_point()
    ]
    held = [one for one in named if one[1].numel()]
    if not held:
        return Broken(count=0, every=0, first="")
    norms = torch._foreach_norm([tensor for _, tensor, _ in held], math.inf)
    largest = torch.stack([one.float() for one in norms]).tolist()
    names = [
        name
        for (name, _, learns), norm in zip(held, largest, strict=True)
        if not math.isfinite(norm) and (learns or math.isnan(norm))  # frozen masks may hold -inf
    ]
    return Broken(count=len(names), every=len(held), first=names[0] if names else "")


def broken_in_words(ranks: Sequence[Broken]) -> str:
    """Describe the non-finite parameters of the first rank that has any."""
    for rank, one in enumerate(ranks):
        if one.count:
            return (
                f"{one.count} of {one.every} parameters of rank {rank} are nan or infinite, "
                f"such as {one.first}"
            )
    return "all parameters are finite"


# A rank is slow if it takes longer than the others' median: for the product by this share of the
# median, for reading rows by this share of a step.
SLOW = 0.1
_EVERY_SECONDS = 10.0
_TRIES = 5  # the fastest one counts, because disturbances only slow a run down
# the product: side of its matrices, and how often one measurement repeats it
_SIDES = {"cuda": (2048, 20), "cpu": (192, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Times of one rank in which it does not wait for other ranks."""

    product_seconds: float
    reading_seconds: float  # the time waited for the rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that is slower than the median of the others."""

    rank: int
    pipeline_rank: int
    what: str
    own_seconds: float
    others_seconds: float

    def __str__(self) -> str:
        own, others = self.own_seconds * 1e3, self.others_seconds * 1e3
        where = f"rank {self.rank} (pipeline rank {self.pipeline_rank})"
        return f"{where} is slow: {self.what} takes it {own:,.3g} ms, the others {others:,.3g} ms"


class Pace:
    """Compares the ranks about every ten seconds, at a step line."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # step lines until the next comparison; the first line is skipped as a warm-up
        self._lines = 1
        self._reading, self._slow_before = mesh.reading.seconds, frozenset[int]()
        # names of the ranks' devices; only ranks with equal devices are compared
        self._kinds: Sequence[str] | None = None

    def slow_ranks(self, steps: int, step_seconds: float) -> Sequence[SlowRank]:
        """Return the slow ranks in the `steps` since the last line; all ranks call this."""
        read, self._reading = self._mesh.reading.seconds - self._reading, self._mesh.reading.seconds
        self._lines -= 1
        if self._mesh.world.size == 1 or self._mesh.is_dry_run or self._lines >= 0:
            return ()
        if self._kinds is None:
            self._kinds = every_rank(_kind(self._mesh.device), self._mesh.world)
        lines = max(int(_EVERY_SECONDS / (steps * step_seconds)), 1)
        own = [product_seconds(self._mesh.device), read / steps, float(lines)]
        every = gathered(
            torch.tensor(own, dtype=torch.float64, device=self._mesh.device), self._mesh.world
        ).tolist()
        self._lines = int(min(one[2] for one in every))
        ranks = [RankTimes(product_seconds=one[0], reading_seconds=one[1]) for one in every]
        each = self._mesh.data.size * self._mesh.tensor.size
        found = list(slow_among(ranks, self._kinds, step_seconds, ranks_of_stage=each))
        # One product may be disturbed, so a rank must be slow twice in a row.
        once, self._slow_before = self._slow_before, frozenset(one.rank for one in found)
        return [one for one in found if one.rank in once]


def slow_among(
    ranks: Sequence[RankTimes], kinds: Sequence[str], step_seconds: float, *, ranks_of_stage: int
) -> Iterator[SlowRank]:
    """Yield the slow ranks, each compared with ranks that have the same kind of device."""
    for rank, own in enumerate(ranks):
        others = [one for n, one in enumerate(ranks) if n != rank and kinds[n] == kinds[rank]]
        if not others:
            continue
        product = median(one.product_seconds for one in others)
        reading = median(one.reading_seconds for one in others)
        for what, own_seconds, theirs, least in (
            ("the same product", own.product_seconds, product, product * SLOW),
            ("reading the rows of a step", own.reading_seconds, reading, step_seconds * SLOW),
        ):
            if own_seconds - theirs > least:
                yield SlowRank(
                    rank=rank,
                    pipeline_rank=rank // ranks_of_stage,
                    what=what,
                    own_seconds=own_seconds,
                    others_seconds=theirs,
                )


def product_seconds(device: torch.device) -> float:
    """Return how long this device takes for a fixed product of two matrices."""
    side, count = _SIDES[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(side, side, dtype=kind, device=device)
    result = torch.empty_like(matrix)
    return min(_seconds(matrix, result, count) for _ in range(_TRIES))


@torch.no_grad()
def _seconds(matrix: Tensor, result: Tensor, count: int) -> float:
    if matrix.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        torch.mm(matrix, matrix, out=result)
    if matrix.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


GO_ON = "go-on"  # a value of --on-nan
_BAR_SECONDS = 0.1  # the least time between two updates of the bar
Planned = tuple[str, float, float]  # the plan's device, and its predicted step seconds and MFU


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The figures of a step line. Times are means over the steps since the last line.

    `memory_bytes` is the peak so far of the first rank. `against_plan` is the measured time of a
    step over the predicted time. `compile_seconds` is how long the first rank compiled layers; the
    means do not count it. None means unknown.
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
    compile_seconds: float | None

    def __str__(self) -> str:
        known = (
            f"step {self.step:>6}   loss {self.loss:.5f}",
            _figure(self.gradient_norm, "norm {:.3g}"),
            _figure(self.learning_rate, "lr {:.3g}"),
            f"{self.seconds * 1e3:,.1f} ms   {self.per_second:,.0f} {self.unit}/s",
            _figure(self.mfu, "MFU {:.1%}"),
            _figure(self.against_plan, "{:.2f} × planned"),
            _figure(self.memory_bytes, "{:.4g} GiB", scale=2**-30),
            _figure(self.compile_seconds, "compiled in {:.1f} s"),
            f"{timedelta(seconds=round(self.seconds_left))} left" if self.seconds_left else "",
        )
        return "   ".join(text for text in known if text)


def compile_seconds() -> float:
    """Return how long torch.compile has worked in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")  # missing until something is compiled
    return 0.0 if utils is None else float(utils.calculate_time_spent()["total_wall_time"])


class Progress:
    """The progress that the first rank prints; times are means since the last line.

    Numbers are read from the device only for these lines.
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
        self._compiled = compile_seconds()
        # seconds of compiling since the last line, and whether this step has compiled
        self._compiling, self._has_compiled = 0.0, False
        self._before: tuple[int, float] | None = None  # step and loss of the last line
        self._scales_loss, self._before_stopping = scales_loss, before_stopping
        self._has_bar = mesh.rank == 0 and not options.json and is_terminal(sys.stdout)
        self._drawn = 0.0

    def log(self, step: int, own_loss: Tensor, norm: Tensor) -> float:
        """Print a step line and return its loss; exit if loss or norm is not finite (--on-nan)."""
        loss = mean_loss(own_loss, self._mesh)
        clipped = largest_norm(norm, self._mesh) if self._options.clip else None
        steps = step - self._step
        line = self._line(step, loss, clipped)
        self._tell(line)
        for one in self._pace.slow_ranks(steps, line.seconds):
            self._metrics.add(event=Event.SLOW, step=step, **asdict(one))
            self._mesh.say(f"note: {one}")
        is_sound = math.isfinite(loss) and (self._scales_loss or math.isfinite(clipped or 0.0))
        was_sound = self._before is None or math.isfinite(self._before[1])
        # fp16 skips a step whose gradients overflow. Only two bad lines in a row are an error.
        if not is_sound and not (self._scales_loss and was_sound):
            self._stop(step, loss, own_loss, clipped)
        self._before = step, loss
        return loss

    def show(self, step: int) -> None:
        """Finish a step: draw a progress bar on a terminal. It needs no numbers from the device.

        The next line's times leave out all steps up to the last one in which layers were compiled.
        Whole steps are left out, because ranks wait for each other while they compile.
        """
        self._note_compiling()
        if self._has_compiled and step != self._step:
            if self._mesh.device.type == "cuda":
                torch.cuda.synchronize()  # queued work still waits for ranks that compile
            self._step, self._begun = step, time.perf_counter()
            self._has_compiled = False
        if not self._has_bar or step in (self._step, self._options.steps):
            return
        now = time.perf_counter()
        if now - self._drawn >= _BAR_SECONDS:
            self._drawn, pace = now, (now - self._begun) / (step - self._step)
            draw_bar(step, self._options.steps, (self._options.steps - step) * pace)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds from the step time, such as those of an evaluation."""
        self._begun += seconds
        self._note_compiling()

    def _note_compiling(self) -> float:
        """Return how long layers were compiled since the last call."""
        before, self._compiled = self._compiled, compile_seconds()
        found = self._compiled - before
        self._compiling += found
        self._has_compiled = self._has_compiled or found > 0
        return found

    def _line(self, step: int, loss: float, norm: float | None) -> StepLine:
        now, compiled = time.perf_counter(), self._note_compiling()
        seconds = (now - self._begun - compiled) / (step - self._step)
        self._step, self._begun = step, now
        compiling, self._compiling, self._has_compiled = self._compiling, 0.0, False
        device, planned_seconds, planned_mfu = self._planned
        is_as_planned = device.startswith("cpu") == (self._mesh.device.type == "cpu")
        # no comparison if layers were compiled: other ranks may have compiled longer
        against = seconds / planned_seconds if is_as_planned and not compiled else None
        return StepLine(
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=self._learning_rate(),
            seconds=seconds,
            per_second=self._amount / seconds,
            unit=self._unit,
            memory_bytes=_memory(self._mesh.device),
            mfu=None if against is None or device.startswith("cpu") else planned_mfu / against,
            against_plan=against,
            seconds_left=(self._options.steps - step) * seconds,
            compile_seconds=compiling or None,
        )

    def _tell(self, line: StepLine) -> None:
        data = asdict(line)
        self._metrics.add(**data)
        # Formulas for a CPU without a profile may be far off, which is no fault of the run.
        is_rough = self._planned[0] == CPU_BY_FORMULA
        shown = replace(line, against_plan=None) if is_rough else line
        self._mesh.say(json.dumps(data) if self._options.json else shown, sys.stdout)

    def _stop(self, step: int, loss: float, own_loss: Tensor, norm: float | None) -> None:
        """Unless --on-nan is go-on, print which ranks' losses are not finite, and exit."""
        if self._options.on_nan == GO_ON:
            return
        self._before_stopping()
        is_own = not math.isfinite(float(own_loss))
        ranks = every_rank((is_own, broken_of(self._parts)), self._mesh.world)
        found = [str(rank) for rank, (is_its, _) in enumerate(ranks) if is_its]
        where = f" on rank {', '.join(found)}" if found else ""
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        before = "" if self._before is None else f"; the loss of step {self._before[0]} was "
        before += "" if self._before is None else f"{self._before[1]:.5f}"
        broken = broken_in_words([one for _, one in ranks])
        why = f"{what} in step {step}{where}{before}; {broken}"
        self._metrics.add(event=Event.STOPPED, step=step, why=why)
        give_up(
            why,
            fix="a lower --lr, or a scheduler that warms up; if --dtype float32 trains, 16 bits "
            "are too few; else look for rows that have no targets; --on-nan go-on trains on",
        )


def _memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def _figure(value: float | None, form: str, *, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)
