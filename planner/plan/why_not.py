"""Answers why a plan was not made with other pins: the cost, or why it is impossible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    Objective,
    allows,
    conflict_text,
    constraints_of,
    minimal_conflict,
)
from autopar.planner.plan.plan import RunnerUp, StoredPlan
from autopar.planner.plan.search.space import allow_degrees, check_degrees
from autopar.planner.plan.telling.explanation import StepPart, part_seconds
from autopar.planner.precision import Compression

_NOTHING_SECONDS = 1e-9  # smaller differences are rounding
# What listed plans differ in (`kind_of` in search/assembly.py). Of plans that differ in other pins
# alone, only the best is listed.
_LISTED = frozenset({"pipeline", "data", "tensor", "zero_levels", "schedules", "stages_per_rank"})

# Returns the best plan under constraints, or a text that says why there is none.
SolvePoint = Callable[[StoredPlan, Constraints], RunnerUp | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The answer: another plan and what decides against it, or only the reason."""

    wanted: str
    alternative: RunnerUp | None
    reasons: tuple[str, ...]


def why_not(plan: StoredPlan, pins: Constraints, solve_point: SolvePoint | None = None) -> WhyNot:
    """Return why a plan does not have the pins; call `solve_point` if the plan does not show it."""
    wanted = ", ".join(one.text for one in pins.declared)

    def answer(*reasons: str, alternative: RunnerUp | None = None) -> WhyNot:
        return WhyNot(wanted=wanted, alternative=alternative, reasons=reasons)

    if _has(plan.arrangement, pins):
        return answer("the plan has it")
    fixed = (*pins.declared, _batch_of(plan))
    try:
        check_degrees(plan.machines.devices, constraints_of(fixed), plan.model.batch)
    except InfeasibleError as error:
        return answer(error.found, *filter(None, (error.expected, error.fix)))
    barring = barring_constraints(plan, fixed)
    fastest = () if plan.fastest is None else (plan.fastest,)
    known = [one for one in (*fastest, *plan.runners_up) if _has(one.arrangement, pins)]
    are_all_listed = {one.field for one in pins.declared} <= _LISTED
    if known and are_all_listed and not barring:
        best = min(known, key=lambda one: one.step_seconds)
        return answer(*_compared(plan, best), alternative=best)
    barred = _barred(barring)
    if solve_point is None:
        return answer(*barred, *([] if barred else _unknown(plan)))
    kept = [one for one in plan.constraints if one not in barring]
    solved = solve_point(plan, constraints_of((*kept, *fixed)))
    if isinstance(solved, str):
        return answer(*barred, solved)
    return answer(*barred, *_compared(plan, solved, barring), alternative=solved)


def _batch_of(plan: StoredPlan) -> Declared:
    """Return a plan's global batch as a constraint, since another batch is another training."""
    batch = plan.arrangement.global_batch
    return Declared(
        place="global_batch",
        field="global_batch",
        value=batch,
        text=f"a global batch of {batch}",
        origin="the plan",
    )


def barring_constraints(plan: StoredPlan, fixed: Sequence[Declared]) -> tuple[Declared, ...]:
    """Return the declared constraints that make other ones, `fixed`, impossible."""
    others = {one.place: one for one in fixed}
    barring = [
        one
        for one in plan.constraints
        if one.place in others and one.value != others[one.place].value
    ]
    rest = [one for one in plan.constraints if one.place not in others]
    facts = plan.model.batch
    feasible = partial(allow_degrees, devices=plan.machines.devices, batch=facts)
    while not feasible((*rest, *fixed)):
        conflict = [one for one in minimal_conflict((*rest, *fixed), feasible) if one in rest]
        barring += conflict
        rest = [one for one in rest if one not in conflict]
    return tuple(barring)


def _barred(barring: Sequence[Declared]) -> tuple[str, ...]:
    if not barring:
        return ()
    it, forbid = ("it", "forbids it") if len(barring) == 1 else ("them", "forbid it")
    return (f"{conflict_text(barring)} {forbid}; without {it}:",)


def _has(arrangement: Arrangement, pins: Constraints) -> bool:
    """Whether an arrangement has the pins, whatever the constraints' defaults are."""
    pinned = replace(
        pins,
        precision=arrangement.precision,
        float8=arrangement.float8,
        compression=tuple(Compression),
        sync_every=arrangement.sync_every,
        outer=arrangement.outer,
        outer_parts=arrangement.outer_parts,
    )
    return allows(pinned, arrangement)


def _compared(
    plan: StoredPlan, other: RunnerUp, barring: Sequence[Declared] = ()
) -> tuple[str, ...]:
    """Return another plan's cost, the decisive term, and the memory."""
    ours, prediction = plan.prediction.step_seconds, plan.prediction
    change = other.step_seconds - ours
    communication = other.communication_seconds - part_seconds(prediction, StepPart.COMMUNICATION)
    idle = other.idle_seconds - part_seconds(prediction, StepPart.BUBBLE)
    terms = (
        ("communication", communication),
        ("bubble", idle),
        ("compute", change - communication - idle),
    )
    memory = other.device_bytes - prediction.peak_memory.device_bytes
    return (
        f"its step takes {seconds_text(other.step_seconds)} instead of {seconds_text(ours)} "
        f"({change / ours:+.1%})",
        *(f"{name} {_signed_seconds(seconds)}" for name, seconds in terms),
        f"memory of the fullest device {_signed_bytes(memory)}",
        _decision(plan, terms, memory_bytes=memory, barring=barring),
    )


def _decision(
    plan: StoredPlan,
    terms: Sequence[tuple[str, float]],
    *,
    memory_bytes: int,
    barring: Sequence[Declared],
) -> str:
    """Return the constraint or term that decides between two plans."""
    is_of_memory = Objective(plan.objective).memory_alone
    worse = memory_bytes if is_of_memory else sum(seconds for _, seconds in terms)
    if worse == 0:
        return "nothing decides: the plan is the simpler one"
    if worse > 0 and is_of_memory:
        return "memory decides: the plan was to need as little of it as possible"
    if worse > 0:
        return f"{max(terms, key=lambda term: term[1])[0]} decides"
    if barring:
        return f"{conflict_text(barring)} decide{'s' if len(barring) == 1 else ''}"
    if plan.fastest is not None:
        return (
            f"the tolerance decides: the plan is simpler, and {plan.slower_by:.1%} slower than "
            "the fastest (--tolerance 0 takes that)"
        )
    return "it is better: the search ended too early, so plan again with more time"


def _unknown(plan: StoredPlan) -> tuple[str, ...]:
    listed = ", ".join(map(str, plan.constraints))
    declared = f"; declared were {listed}" if listed else ""
    return (
        "it is not among the plans that were kept: a constraint refused it, it needs too much "
        f"memory, or its bound is above {seconds_text(plan.prediction.step_seconds)}{declared}",
        "plan again with this as --pin to see what it costs",
    )


def _signed_seconds(seconds: float) -> str:
    if abs(seconds) < _NOTHING_SECONDS:
        return "±0"
    return f"{'−' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def _signed_bytes(size_bytes: int) -> str:
    return f"{'−' if size_bytes < 0 else '+'}{bytes_text(abs(size_bytes))}" if size_bytes else "±0"
