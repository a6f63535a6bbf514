"""Tells which arrangements must compute layers again, whatever their stages and layouts."""

from __future__ import annotations

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.bounds.bounding import Bounds
from autopar.planner.plan.bounds.relaxed_memory import activation_budget_bytes


def must_recompute(bounds: Bounds, arrangement: Arrangement) -> bool:
    """Whether all that the layers keep is more than the ranks together have room for."""
    facts, margin = bounds.of_any(arrangement), bounds.questions.constants.margin
    size = bounds.questions.most_bytes(arrangement)
    budget = activation_budget_bytes(
        arrangement,
        rank_bytes=size / (1.0 + margin) - facts.transient_bytes(arrangement),
        state_bytes=facts.state_bytes(arrangement),
    )
    return facts.ladder.saved_bytes > budget
