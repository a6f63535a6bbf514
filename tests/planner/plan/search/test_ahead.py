"""Processes that find prices ahead change nothing of a plan, and are gone when it is found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from multiprocessing import active_children, get_context
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.files.document import plan_text
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search import ahead
from autopar.planner.plan.search.ahead import none
from autopar.planner.plan.search.search import search
from autopar.planner.plan.solving.prices import Prices
from autopar.planner.programs.layouts.choice import LayoutProgram, LayoutSolution
from tests.planner.plan.plans import model, parts_of
from tests.planner.plan.searches import declared


@pytest.fixture(autouse=True)
def may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST_WORKERS", 7)
    monkeypatch.setattr(ahead, "free_cores", lambda: 7)


@pytest.fixture
def solved_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects a number for each layout program that this process solves."""
    found, solve = list[int](), LayoutProgram.fastest

    def fastest(self: LayoutProgram) -> LayoutSolution:
        found.append(os.getpid())
        return solve(self)

    monkeypatch.setattr(LayoutProgram, "fastest", fastest)
    return found


def plan_with(workers: ahead.Idle, prices: Prices | None = None) -> Plan:
    graph, axes, layers = parts_of("llama.py", "size=tiny")
    cluster, demands = choose_cluster(4, "h100-sxm"), declared(global_batch=16)
    facts = model(graph, "llama.py")
    return search(graph, axes, layers, facts, cluster, demands, workers=workers, prices=prices)


def workers_left() -> list[BaseProcess]:
    """The workers that run; other tests of this process have forked servers."""
    return [one for one in active_children() if isinstance(one, ForkProcess)]


@cache
def alone() -> str:
    return told(plan_with(none))


def told(plan: Plan) -> str:
    """The plan as it is written, without the time that its search took."""
    return plan_text(replace(plan, proof=replace(plan.proof, search_seconds=0.0)))


def test_plans_are_the_same_with_any_number_of_workers(solved_here: list[int]) -> None:
    expected, at_first = told(plan_with(none)), len(solved_here)
    for workers in (1, 3):
        solved_here.clear()
        assert told(plan_with(partial(int, workers))) == expected
        assert len(solved_here) < at_first  # workers solved the others
        assert not workers_left()


def test_a_search_goes_on_without_a_worker_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[int]()
    start = ahead.Ahead._start

    def start_and_kill(self: ahead.Ahead, missing: int) -> None:
        start(self, missing)
        for process in workers_left():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed.append(process.pid)

    monkeypatch.setattr(ahead.Ahead, "_start", start_and_kill)
    assert told(plan_with(lambda: 2)) == alone()
    assert len(killed) == 2


def test_workers_end_with_a_search_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead.Ahead, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_with(lambda: 2)
    assert not workers_left()


def test_no_worker_starts_where_all_prices_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = Prices()
    plan_with(none, prices)
    stored = dict(prices.grown())
    monkeypatch.setattr(ahead.Ahead, "_start", lambda *_: pytest.fail("a worker starts"))
    plan_with(lambda: 3, Prices(recall=lambda _, key: stored.get(key)))


def test_workers_leave_busy_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, busy, idle in ((1, 2, 0), (2, 2, 0), (2, 1, 1), (4, 2, 2)):
        monkeypatch.setattr(ahead, "usable_cores", lambda cores=cores: cores)
        assert ahead.idle_cores(busy) == idle
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(ahead.idle_cores) == 0  # a daemon


def test_no_worker_starts_beside_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "free_cores", lambda: 0)
    monkeypatch.setattr(ahead, "_SearchWorker", lambda *_: pytest.fail("a worker starts"))
    assert told(plan_with(lambda: 3)) == alone()


def test_a_worker_starts_once_a_core_is_idle(solved_here: list[int]) -> None:
    left = iter([0] * 10)
    expected, at_first = told(plan_with(none)), len(solved_here)
    solved_here.clear()
    found = plan_with(lambda: next(left, 1))
    assert told(found) == expected
    assert len(solved_here) < at_first
