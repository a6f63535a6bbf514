"""Solves a point of a plan's space again, from what the plan holds alone."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.axes.infer import infer_axes
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.errors import InfeasibleError, TimeLimitError
from autopar.planner.layers import find_layers
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.plan import Plan, RunnerUp
from autopar.planner.plan.search.search import search
from autopar.planner.plan.telling.explanation import Part, part_seconds
from autopar.planner.plan.telling.words import recompute_words

TIME_LIMIT_SECONDS = 60.0


def solve_point(
    plan: Plan,
    constraints: Constraints,
    *,
    measured: Measurements | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> RunnerUp | str:
    """Return the fastest plan of the same training under other constraints, or why none is."""
    axes = infer_axes(plan.graph)
    try:
        other = search(
            plan.graph,
            axes,
            find_layers(plan.graph, axes),
            plan.model,
            plan.cluster,
            replace(constraints, tolerance=0.0),
            time_limit_seconds=time_limit_seconds,
            measured=measured,
        )
    except (InfeasibleError, TimeLimitError) as error:
        return error.found
    return _as_runner_up(other)


def _as_runner_up(plan: Plan) -> RunnerUp:
    gap = plan.proof.gap
    return RunnerUp(
        arrangement=plan.arrangement,
        recompute=recompute_words(plan.stages),
        step_seconds=plan.prediction.step_seconds,
        mfu=plan.prediction.mfu,
        device_bytes=plan.prediction.peak_memory.device_bytes,
        communication_seconds=part_seconds(plan.prediction, Part.COMMUNICATION),
        idle_seconds=part_seconds(plan.prediction, Part.BUBBLE),
        difference=f"the time limit came first: it can be better by {gap:.1%}" if gap else "",
    )
