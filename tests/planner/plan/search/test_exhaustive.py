"""Tests that the search loses nothing: against solving every arrangement that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.ops.measurements import HostTimes
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.declared.limits import with_batch
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost
from tests.cells import cells
from tests.planner.plan.plans import parts_of
from tests.planner.plan.searches import declared
from tests.planner.profile.measurements import TIMES, net

ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on some devices, with little memory or much, by formulas or with a profile."""

    model: tuple[str, ...]
    gpus: int
    batch: int
    memory: str
    device: str = "a100-80gb-sxm"
    measured: MeasuredFile | None = None
    tensor: int | None = None  # the degree, if pinned

    def __str__(self) -> str:
        by = ", measured" if self.measured else ""
        return f"{' '.join(self.model)} on {self.gpus} × {self.device} with {self.memory}{by}"


def profile(times: HostTimes, *points: tuple[int, float]) -> MeasuredFile:
    """Return a profile of CPUs with this host, where collectives take as long as these points."""
    own = MeasuredHost(device="cpu", threads=1, torch="2.13.0", times=times)
    kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    collectives = tuple(
        replace(net().collectives[0], collective=kind, points=points) for kind in kinds
    )
    nets = (replace(net(), collectives=collectives),) if points else ()
    return MeasuredFile(hosts=(own,), nets=nets)


# A large payload takes longer than its parts: a bound must not take all layers' at once.
SLOW_LARGE = profile(TIMES, (1_000, 1e-5), (100_000, 1e-4), (10_000_000, 1e-1))
LARGE = (
    Case(model=("gpt2.py", "size=124m"), gpus=4, batch=32, memory="5.5 GiB"),
    Case(model=("gpt2.py", "size=124m"), gpus=8, batch=16, memory="80%"),
    # The fastest layouts have more weights whole than others, which ZeRO-3 gathers: others win.
    Case(
        model=("llama.py", "size=8b", "layers=4"),
        gpus=32,
        batch=32,
        memory="9 GiB",
        device="h100-sxm",
        tensor=8,
    ),
    Case(model=("gpt2.py",), gpus=8, batch=8, memory="80%"),
    Case(model=("resnet.py",), gpus=4, batch=16, memory="80%"),
    Case(model=("t5.py",), gpus=2, batch=8, memory="80%"),
)
CASES = (
    *LARGE,
    Case(model=("gpt2.py",), gpus=2, batch=8, memory="80%"),
    # Two of three arrangements do not fit.
    Case(model=("gpt2.py", "size=124m", "layers=4"), gpus=2, batch=8, memory="2.9 GiB"),
    Case(model=("gpt2.py",), gpus=2, batch=8, memory="80%", device="cpu"),
    *(
        Case(
            model=("mnist.py", "hidden=2048"),
            gpus=2,
            batch=4,
            memory="80%",
            device="cpu",
            measured=one,
        )
        for one in (SLOW_LARGE,)
    ),
)


EVERY = cells(CASES, [case for case in CASES if case not in LARGE])


def explorer(case: Case) -> Explorer:
    """The search of a case, not begun."""
    graph, axes, layers = parts_of(*case.model)
    cluster = choose_cluster(case.gpus, case.device)
    if case.measured is not None:
        cluster = case.measured.on(cluster)
    pins = {"pins__tp": case.tensor} if case.tensor else {}
    constraints = declared(global_batch=case.batch, limits__memory=case.memory, **pins)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    return Explorer(
        subject, cluster, with_batch(constraints, cluster, graph), measured=case.measured
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What one arrangement comes to, infinite where none fits, and what was said before."""

    arrangement: Arrangement
    of_point: float
    unsolved: float
    without_memory: float
    within_memory: float
    of_variant: float
    value: float


@cache
def solved(case: Case) -> tuple[Solved, ...]:
    """Solve every arrangement that is allowed, nothing left out."""
    return tuple(_solved(explorer(case)))


def _solved(every: Explorer) -> Iterator[Solved]:
    for point in every.points:
        for variant in every.points.variants(point):
            found = every.solver.solve(variant).candidate
            value = found.prediction.step_seconds if found else inf
            yield Solved(
                arrangement=variant,
                of_point=every.bounds.of_point(point),
                unsolved=every.bounds.unsolved(variant),
                without_memory=every.bounds.without_memory(variant),
                within_memory=every.bounds.within_memory(variant),
                of_variant=every.bounds.of_variant(variant),
                value=value,
            )


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_no_bound_exceeds_what_an_arrangement_comes_to(case: Case) -> None:
    for one in solved(case):
        assert one.of_point <= one.value * ROUNDING, one
        assert one.unsolved <= one.value * ROUNDING, one
        assert one.without_memory <= one.value * ROUNDING, one
        assert one.within_memory <= one.value * ROUNDING, one
        assert one.of_variant <= one.value * ROUNDING, one


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_the_search_finds_what_solving_everything_finds(case: Case) -> None:
    outcome = explorer(case).explore()
    assert outcome.is_complete
    assert outcome.found[0].value == min(one.value for one in solved(case))
    assert outcome.gap == 0.0


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_case_has_something_to_choose(case: Case) -> None:
    values = {one.value for one in solved(case)}
    assert len(values) > 10
    assert min(values) < inf
