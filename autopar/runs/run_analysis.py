"""Turns a plan and the step lines of a run into figures side by side, and what is far off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autopar.planner.plan.plan import Plan
from autopar.runtime.ranks.metrics import Event

FAR = 0.25  # of the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was predicted, and what was measured; `unit` as autopar.pages.tables has them."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the measured figure is above the predicted one, as a share of that."""
        return self.measured / self.predicted - 1

    @property
    def is_far_off(self) -> bool:
        """Whether it is off by more than a quarter, to either side."""
        return abs(self.error) > FAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A run beside its plan: medians over its step lines, but for the first of each start."""

    lines: int
    fastest_seconds: float
    slowest_seconds: float
    is_on_planned_device: bool
    figures: tuple[Figure, ...]
    keeping_seconds: float | None  # of a checkpoint, while the training waits


def analyze(plan: Plan, lines: Sequence[dict[str, Any]]) -> Analysis | None:
    """Compare a plan with the lines of a run; None where it has told no step."""
    steps = _steady(lines)
    if not steps:
        return None
    seconds = [float(one["seconds"]) for one in steps]
    kept = [
        float(one.get("waited_seconds", one["seconds"]))  # of earlier runs all of it
        for one in lines
        if one.get("event") == Event.KEPT
    ]
    return Analysis(
        lines=len(steps),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        is_on_planned_device=any(one.get("against_plan") is not None for one in steps),
        figures=tuple(_figures(plan, steps)),
        keeping_seconds=median(kept) if kept else None,
    )


def _steady(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return step lines without the first of each start, which warms up; if it is alone, that."""
    steady: list[dict[str, Any]] = []
    warming: list[dict[str, Any]] = []
    is_first = True
    for one in lines:
        if "event" in one:
            is_first = is_first or one["event"] == Event.STARTED
        elif "seconds" in one:
            (warming if is_first else steady).append(one)
            is_first = False
    return steady or warming


def _figures(plan: Plan, steps: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    predicted = plan.prediction
    seconds = median(float(one["seconds"]) for one in steps)
    yield Figure(name="step", unit="s", predicted=predicted.step_seconds, measured=seconds)
    amount = plan.arrangement.global_batch * plan.model.tokens_per_row
    yield Figure(
        name=f"{steps[-1].get('unit', 'rows')} a second",
        unit="1/s",
        predicted=amount / predicted.step_seconds,
        measured=amount / seconds,
    )
    shares = [float(one["mfu"]) for one in steps if one.get("mfu") is not None]
    if shares:
        yield Figure(name="MFU", unit="share", predicted=predicted.mfu, measured=median(shares))
    held = [float(one["memory_bytes"]) for one in steps if one.get("memory_bytes") is not None]
    if held:
        yield Figure(
            name="memory of the first rank",
            unit="B",
            predicted=_first_rank_bytes(plan),
            measured=max(held),
        )


def _first_rank_bytes(plan: Plan) -> float:
    """Return what is predicted for the first pipeline rank, as the allocator counts it."""
    stages = zip(plan.stages, plan.prediction.stages, strict=True)
    return next(one.memory.reserved_bytes for stage, one in stages if stage.rank == 0)
