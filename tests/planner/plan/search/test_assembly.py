"""The words on how another plan differs from the chosen one."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.plan.search.assembly import _difference
from tests.planner.plan.plans import prediction

BEST = prediction()


def other(**seconds: float) -> str:
    """Return how a plan differs whose terms take other seconds."""
    terms = tuple(
        replace(one, seconds=seconds.get(one.name.split()[-1], one.seconds)) for one in BEST.terms
    )
    step = sum(one.seconds for one in terms)
    return _difference(prediction(terms=terms, step_seconds=step), BEST)


def test_the_largest_difference_and_the_sum_of_all_others_are_told() -> None:
    assert other(compute=0.009, bubble=0.0) == "+3 ms compute, -1 ms elsewhere"
    assert other(compute=0.009) == "+3 ms compute"
    assert other(compute=0.003, bubble=0.002) == "-3 ms compute, +1 ms elsewhere"


def test_equal_steps_differ_in_memory_alone() -> None:
    assert other() == ""
