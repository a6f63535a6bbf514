"""Turns a plan and the step lines of a run into figures side by side, and what is far off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autopar.planner.costs.prediction import StagePrediction
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
        if not self.predicted:
            return 0.0 if not self.measured else float("inf")
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
    profiled_step: int | None  # of --profile-step
    ranks: tuple[Figure, ...]  # of its pipeline ranks, by the medians of their ranks
    keeping_seconds: float | None  # of a checkpoint, while the training waits


def analyze(plan: Plan, lines: Sequence[dict[str, Any]]) -> Analysis | None:
    """Compare a plan with the lines of a run; None where it has told no step."""
    steps = _steady(lines)
    if not steps:
        return None
    seconds = [float(one["seconds"]) for one in steps]
    kept = [
        float(one["seconds"] if one.get("waited_seconds") is None else one["waited_seconds"])
        for one in lines
        if one.get("event") == Event.KEPT
    ]
    profiled = next((o for o in reversed(lines) if o.get("event") == Event.PROFILED), None)
    return Analysis(
        lines=len(steps),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        is_on_planned_device=any(one.get("against_plan") is not None for one in steps),
        figures=tuple(_figures(plan, steps)),
        profiled_step=None if profiled is None else int(profiled["step"]),
        ranks=() if profiled is None else tuple(_rank_figures(plan, profiled["ranks"])),
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
        elif one.get("seconds") is not None:
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
            predicted=_reserved_bytes(plan, 0),
            measured=max(held),
        )


def _reserved_bytes(plan: Plan, rank: int) -> float:
    """Return what is predicted for a pipeline rank, as the allocator counts it."""
    return _stages(plan, rank)[0].memory.reserved_bytes


def _stages(plan: Plan, rank: int) -> list[StagePrediction]:
    """Return what is predicted for the stages of a pipeline rank."""
    stages = zip(plan.stages, plan.prediction.stages, strict=True)
    return [one for stage, one in stages if stage.rank == rank]


def _rank_figures(plan: Plan, ranks: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Yield what each pipeline rank did in the step that was profiled."""
    step = plan.prediction.step_seconds
    for rank in range(plan.arrangement.pipeline):
        own = [one for one in ranks if one["pipeline_rank"] == rank]
        if not own:  # the run had fewer
            continue
        seconds = _computing_seconds(plan, rank)
        measured, whole = (
            median(float(one[name]) for one in own) for name in ("compute_seconds", "step_seconds")
        )
        name = f"pipeline rank {rank}" if plan.arrangement.pipeline > 1 else "a rank"
        yield Figure(name=f"{name}: computing", unit="s", predicted=seconds, measured=measured)
        yield Figure(
            name=f"{name}: messages and waiting",
            unit="s",
            predicted=max(0.0, step - seconds),
            measured=whole - measured,
        )
        held = [float(one["memory_bytes"]) for one in own if one.get("memory_bytes") is not None]
        if held:
            reserved = _reserved_bytes(plan, rank)
            yield Figure(name=f"{name}: memory", unit="B", predicted=reserved, measured=max(held))


def _computing_seconds(plan: Plan, rank: int) -> float:
    """Return how long a pipeline rank computes in a step, by the prediction."""
    of_layers = sum(
        one.forward_seconds + one.backward_seconds - one.tensor_seconds
        for one in _stages(plan, rank)
    )
    optimizer = sum(one.seconds for one in plan.prediction.terms if one.name == "optimizer")
    return plan.arrangement.microbatches * of_layers + optimizer
