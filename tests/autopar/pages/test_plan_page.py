"""The page of a plan says by what it was chosen, and which plan is the fastest."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from autopar.console import PlainConsole
from autopar.pages.plan_page import plan_page
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.plan import Plan
from tests.planner.plan.searches import TINY_GPT2, planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(TINY_GPT2, choose_cluster(2, "a100-80gb-sxm"), global_batch=8, pins__pp=1)


def page_of(plan: Plan) -> str:
    console = PlainConsole(width=150, record=True, file=StringIO())
    for part in plan_page(plan):
        console.print(part)
    return console.export_text()


def with_faster(plan: Plan) -> Plan:
    """Return the plan beside another one that takes four fifths of its step."""
    step_seconds = 0.8 * plan.prediction.step_seconds
    return replace(plan, fastest=replace(plan.runners_up[0], step_seconds=step_seconds))


def test_a_simpler_plan_is_told_as_chosen_and_the_fastest_beside_it(plan: Plan) -> None:
    page = page_of(with_faster(plan))
    assert "wanted: the simplest plan whose step is at most 3% longer than the shortest" in page
    assert page.index("chosen: simpler, and 25.0% slower") < page.index("the fastest: ")


def test_the_fastest_plan_needs_no_mark_where_it_is_chosen(plan: Plan) -> None:
    page = page_of(plan)
    assert "the fastest" not in page
    assert "chosen: simpler" not in page


def test_under_the_objective_memory_the_fastest_of_these_is_marked(plan: Plan) -> None:
    faster = with_faster(plan).fastest
    assert faster is not None
    page = page_of(replace(plan, objective="memory", runners_up=(faster,)))
    assert "wanted: the least memory on the fullest device (--objective)" in page
    assert page.index("chosen: the least memory") < page.index("the fastest of these: ")
