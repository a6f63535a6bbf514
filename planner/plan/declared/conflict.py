"""Finds the least of some constraints that cannot be had together (a deletion filter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.planner.plan.declared.constraints import Declared


def minimal_conflict(
    constraints: Sequence[Declared], is_feasible: Callable[[Sequence[Declared]], bool]
) -> tuple[Declared, ...]:
    """Return constraints that are infeasible together, and feasible without any one of them.

    Each is left out in turn, for good where the rest stays infeasible; feasibility must not be lost
    by leaving one out. Nothing is returned where even no constraint at all is infeasible.
    """
    conflict = tuple(constraints)
    assert not is_feasible(conflict), "there is no conflict among feasible constraints"
    for one in constraints:
        rest = tuple(other for other in conflict if other is not one)
        if not is_feasible(rest):
            conflict = rest
    return conflict


def conflict_text(conflict: Sequence[Declared]) -> str:
    """Return a conflict as one phrase: "tp=8 (--pin) and at most tp=4 (--max-tp)"."""
    *first, last = map(str, conflict)
    return f"{', '.join(first)} and {last}" if first else last
