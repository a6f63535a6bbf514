"""Chooses the plan: a best-first search over arrangements, each solved by integer programs.

    degrees × microbatch × compiled  bounded by the fastest split of each op, without communication
    └ schedule × stages per rank × ZeRO × shard × compression × offload × local steps
                                    bounded also by gathers, reductions, updates, recomputation
      └ the fastest layouts         bounded also by communication
        └ layouts that need less memory are solved
                                    bounded also by the recomputation that these need
          └ stages are solved       an exact prediction

The first prediction that is not above any remaining bound is the best in this space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.steps.framework import framework_constants
from autopar.planner.errors import AutoparError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.plan.bounds.bounding import BoundKind, bounds_of, must_recompute
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    HostSaving,
    Objective,
    constraints_of,
    minimal_conflict,
)
from autopar.planner.plan.declared.limits import completed, with_batch
from autopar.planner.plan.plan import Model, Plan
from autopar.planner.plan.search.ahead import Ahead, Idle, none
from autopar.planner.plan.search.assembly import MOST_SHOWN, Counts, assemble, kind_of
from autopar.planner.plan.search.best_first import (
    Complexity,
    FoundLeaf,
    Outcome,
    SearchNode,
    Unproved,
    best_first,
    never,
    simplest_leaf,
)
from autopar.planner.plan.search.demands import (
    choices_of,
    demands_of,
    host_saving,
    layout_rules,
    needs_host,
    nothing_runs,
    too_large,
    too_late,
)
from autopar.planner.plan.search.points import (
    BestByComplexity,
    Points,
    SearchItem,
    SearchPoint,
    Variant,
    complexity,
    complexity_of,
    families,
    simplicity,
)
from autopar.planner.plan.search.space import Choices
from autopar.planner.plan.solving.candidate import (
    ArrangementSolver,
    Candidate,
    Questions,
    SolvedArrangement,
)
from autopar.planner.plan.solving.costing import PriceBook, SearchSubject, model_flops
from autopar.planner.plan.solving.prices import Prices
from autopar.planner.programs.stages.choice import EXACT, NEAR, QUICK, THOROUGH, is_wide

_ENDLESS_BYTES = 1 << 60
EFFORTS = (QUICK, THOROUGH, EXACT)  # for one arrangement, one after another
_BETTER = 1.0 - 1e-9  # of the best step: only values below this are better
# expanded for runners-up after the best plan is proved; not seconds, so that runs find the same
EXTRA_NODES = 18

Searched = Outcome[SearchItem, Candidate]
Entry = SearchNode[SearchItem] | FoundLeaf[Candidate] | Unproved


def search(
    graph: Graph,
    axes: GraphAxes,
    layers: Layers,
    model: Model,
    cluster: Cluster,
    constraints: Constraints,
    *,
    time_limit_seconds: float | None = None,
    report: Callable[[str], None] = lambda _: None,
    measured: Measurements | None = None,
    prices: Prices | None = None,
    workers: Idle = none,
) -> Plan:
    """Return the best plan with its proof and the runners-up.

    `workers` returns how many other processes may find prices ahead. If nothing fits, or only plans
    with the optimizer on the host, layers may save tensors there even if recomputing is faster.
    """
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    constraints = completed(constraints, cluster, graph)
    began = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - began > (time_limit_seconds or float("inf"))

    tried = list[tuple[Searched, Explorer]]()
    for saving in (constraints.host_saving, HostSaving.ALWAYS):
        own = replace(constraints, host_saving=saving)
        explorer = Explorer(subject, cluster, own, report=report, measured=measured, prices=prices)
        outcome = explorer.explore(is_late=is_late, workers=workers)
        tried.append((outcome, explorer))
        may_save_more = outcome.is_complete and explorer.costing.may_save_more
        if not may_save_more or not needs_host(outcome.found, constraints):
            break
    outcome, explorer = min(reversed(tried), key=lambda one: one[0].value)
    if not outcome.found:
        raise explorer.refusal(outcome)
    return assemble(
        outcome,
        explorer.chosen(outcome, is_late),
        costing=explorer.costing,
        model=model,
        constraints=constraints,
        limits=explorer.solver.demands.limit_bytes,
        counts=Counts(
            enumerated=explorer.points.enumerated(),
            solved=len(explorer.solved),
            infeasible=len(explorer.infeasible - explorer.solved),
            programs=explorer.programs + explorer.costing.layout_report().calls,
            seconds=time.perf_counter() - began,
        ),
    )


class Explorer:
    """The tree of one search: its roots, the expansion of nodes, and counters."""

    def __init__(
        self,
        subject: SearchSubject,
        cluster: Cluster,
        constraints: Constraints,
        *,
        report: Callable[[str], None] = lambda _: None,
        measured: Measurements | None = None,
        prices: Prices | None = None,
    ) -> None:
        assert constraints.global_batch is not None
        self.subject, self.cluster, self.constraints = subject, cluster, constraints
        self.report = report
        self.choices: Choices = choices_of(subject, cluster, constraints)
        self.costing = PriceBook(
            subject,
            cluster,
            precision=constraints.precision,
            float8=constraints.float8,
            rules=layout_rules(constraints, subject.axes),
            host_saving=host_saving(cluster, constraints),
            measured=measured,
            prices=prices,
        )
        questions = Questions(
            costing=self.costing,
            demands=demands_of(subject, cluster, constraints),
            constants=framework_constants((node.device for node in cluster.nodes), measured),
        )
        flops = model_flops(subject, constraints.global_batch)
        self.solver = ArrangementSolver(questions=questions, model_flops=flops)
        self.bounds = bounds_of(questions, constraints.objective)
        self.solved: set[Arrangement] = set()  # some are solved again, to find a simpler plan
        self.infeasible: set[Arrangement] = set()
        self.programs = 0
        is_exact = constraints.objective.memory_alone
        self._known = BestByComplexity(tolerance=0.0 if is_exact else constraints.tolerance)
        self._least: dict[tuple[object, ...], float] = {}  # least seconds of each kind of plan
        self._looked_beside = 0  # nodes expanded since the best was proved
        self._is_choosing = False  # whether the fastest is proved, and the simplest is searched for
        self._left_out: list[SearchNode[SearchItem]] = []  # no faster, but perhaps simpler

    def explore(self, *, is_late: Callable[[], bool] = never, workers: Idle = none) -> Searched:
        """Search until the best is proved and there are some distinct runners-up."""
        with Ahead(self.bounds, workers) as ahead:

            def watch(least_bound: float, now: SearchItem, soon: Iterable[SearchItem]) -> None:
                if not self.constraints.objective.memory_alone:
                    self.report(self._known.words(least_bound))
                ahead.look(now, soon)

            return best_first(
                self.roots(), self.expand, is_late=is_late, enough=self._is_enough, watch=watch
            )

    def chosen(self, outcome: Searched, is_late: Callable[[], bool]) -> Candidate:
        """Return the chosen plan, with layouts as simple as the tolerance allows."""
        leaf, tolerance = self.choose(outcome, is_late).leaf, self._known.tolerance
        within = outcome.found[0].value * (1 + tolerance)
        return leaf if not tolerance or is_late() else self.solver.simplified(leaf, within)

    def choose(self, outcome: Searched, is_late: Callable[[], bool]) -> FoundLeaf[Candidate]:
        """Return the simplest plan within the tolerance of the fastest plan."""
        fastest = outcome.found[0]
        if not self._known.tolerance:
            return fastest
        self._looked_beside, self._is_choosing = 0, True
        return simplest_leaf(
            outcome.found,
            (*outcome.waiting, *self._left_out),
            self.expand,
            of_leaf=complexity_of,
            below=self._complexity_below,
            within=fastest.value * (1 + self._known.tolerance),
            is_late=is_late,
        )

    def know(self, seconds: float) -> None:
        """Restrict the search to faster plans than one that another search has found."""
        self._known = self._known.with_one((), seconds)

    def _complexity_below(self, item: SearchItem) -> Complexity:
        """Return the least complexity below a point or a variant."""
        again = isinstance(item, Variant) and must_recompute(self.bounds, item.arrangement)
        return complexity(item.arrangement, recomputes=again)

    def roots(self) -> list[SearchNode[SearchItem]]:
        """Return the points with their bounds."""
        points, bound = self.points, self.bounds.of_point
        return [SearchNode(bound=bound(x), rank=simplicity(x), item=SearchPoint(x)) for x in points]

    def _is_enough(self, passed: int) -> bool:
        """Whether the best is proved, and there are runners-up to compare it with."""
        self._looked_beside += passed > 0
        return passed > MOST_SHOWN or self._looked_beside > EXTRA_NODES

    def _to_beat(self, arrangement: Arrangement) -> float:
        """Return the seconds to beat; for runners-up, those of the last one that may be listed."""
        if self._looked_beside:
            slower = sorted(self._least.values())[MOST_SHOWN + 1 :]
            return min(slower, default=float("inf"))
        if not self._is_choosing:
            return self._known.fastest
        return self._known.to_beat(self._complexity_below(Variant(arrangement)))

    @property
    def points(self) -> Points:
        """The points that the constraints allow."""
        return Points(
            subject=self.subject,
            cluster=self.cluster,
            constraints=self.constraints,
            choices=self.choices,
            orders=self.costing.orders,
            bounds=self.bounds,
            bucket_bytes=self.solver.demands.bucket_bytes[0],
        )

    def expand(self, item: SearchItem) -> Iterable[Entry]:
        """Return a point's variants, a variant with a sharper bound, or its solution."""
        if isinstance(item, SearchPoint):
            grouped = families(self.points.variants(item.arrangement))
            return [one for family in grouped for one in self._bounded(family, BoundKind.UNSOLVED)]
        if item.bound_kind is not BoundKind.OF_LAYOUTS:
            return self._bounded(item.family, BoundKind(item.bound_kind + 1))
        found = self.solve(item)
        thriftier = [self._bounded([one], BoundKind.OF_ANY) for one in item.thriftier]
        return sum(thriftier, found)

    def _bounded(
        self, family: Sequence[Arrangement], bound_kind: BoundKind
    ) -> list[SearchNode[SearchItem]]:
        """Return the family's members that memory does not exclude, with their bounds."""
        if bound_kind is BoundKind.OF_ANY and family[0].tensor == 1:
            bound_kind = BoundKind.OF_LAYOUTS  # without tensor ranks there is one layout
        bounds = {one: self.bounds.of_kind(bound_kind, one) for one in family}
        possible = [one for one in family if bounds[one] < float("inf")]
        self.infeasible |= set(family) - set(possible)
        if not possible:
            return []
        item = Variant(possible[0], tuple(possible[1:]), bound_kind)
        return [SearchNode(bound=min(bounds.values()), rank=simplicity(possible[0]), item=item)]

    def solve(self, item: Variant) -> list[Entry]:
        """Return the best candidate of an arrangement, if any, and what is still open."""
        arrangement, to_beat = item.arrangement, self._to_beat(item.arrangement)
        if self.constraints.objective.memory_alone:
            answer = self.solver.solve_smallest(arrangement)
        else:
            answer = self.solver.solve(
                arrangement,
                least=lambda number: self.bounds.of_solution(arrangement, number),
                known_seconds=to_beat,
                effort=QUICK if self._looked_beside else EFFORTS[item.effort],
            )
        self.programs += answer.report.calls
        candidate = answer.candidate
        if candidate is None and answer.bound_seconds == float("inf"):
            self.infeasible.add(arrangement)
            return []
        left = self._still_open(item, answer, to_beat)
        if candidate is None:
            return left
        self.solved.add(arrangement)
        kind, seconds = kind_of(candidate), candidate.prediction.step_seconds
        self._known = self._known.with_one(complexity_of(candidate), seconds)
        self._least[kind] = min(seconds, self._least.get(kind, float("inf")))
        leaf = FoundLeaf(value=self.value(candidate), rank=simplicity(arrangement), leaf=candidate)
        return [leaf, *left]

    def _still_open(self, item: Variant, answer: SolvedArrangement, to_beat: float) -> list[Entry]:
        """Return what remains of an arrangement: to be solved with more effort, or unproved.

        An arrangement without a faster plan than a known one may still have a simpler one: it is
        kept until the simplest plan is chosen.
        """
        if self._looked_beside:
            return []
        found = answer.candidate.prediction.step_seconds if answer.candidate else float("inf")
        rank, bound = simplicity(item.arrangement), answer.bound_seconds
        if bound >= min(to_beat, found) * _BETTER:
            if bound < found * _BETTER and not self._is_choosing:
                again = replace(item, effort=0, thriftier=())
                self._left_out.append(SearchNode(bound=bound, rank=rank, item=again))
            return []
        again = replace(item, effort=item.effort + 1, thriftier=())
        is_last = again.effort + 1 == len(EFFORTS)
        only_proves = is_last and (is_wide(item.arrangement) or found > NEAR * to_beat)
        if answer.is_final or again.effort == len(EFFORTS) or (only_proves and self._is_choosing):
            return [Unproved(bound=bound)]
        kinds = {"is_deep": False, "is_last": is_last, "only_proves": only_proves}
        return [SearchNode(bound=bound, rank=rank, item=again, **kinds)]

    def value(self, candidate: Candidate) -> float:
        """Return what the objective minimises: bytes, or seconds (cost is proportional to them)."""
        return self.constraints.objective.minimised(candidate.prediction, 1.0)

    def refusal(self, outcome: Searched) -> AutoparError:
        """Return the error that says why there is no plan: time, arrangements or memory."""
        if not outcome.is_complete:
            return too_late(len(outcome.waiting))
        least = self._roomy().least()
        if least is None:
            return nothing_runs(self._conflict(), self.subject, devices=self.cluster.size)
        return too_large(least, self.solver.demands, self.cluster)

    def _conflict(self) -> tuple[Declared, ...]:
        """Return constraints that together exclude all arrangements, but not if one is missing."""

        def is_feasible(declared: Sequence[Declared]) -> bool:
            kept = with_batch(constraints_of(declared), self.cluster, self.subject.graph)
            explorer = Explorer(self.subject, self.cluster, kept, report=self.report)
            return explorer._roomy().least() is not None

        declared = self.constraints.declared
        return minimal_conflict(declared, is_feasible) if declared else ()

    def _roomy(self) -> Explorer:
        """Return the search for the plan with the least memory, without memory limits."""
        other = self.within(_ENDLESS_BYTES, Objective.MEMORY)
        endless = replace(other.solver.demands, host_limit_bytes=_ENDLESS_BYTES)
        other.solver = other.solver.under(endless)
        other.bounds = bounds_of(other.solver.questions, Objective.MEMORY)
        return other

    def within(self, limit_bytes: int, objective: Objective) -> Explorer:
        """Return the search with another memory limit on every device, for an objective."""
        other = copy(self)
        other.constraints = replace(self.constraints, objective=objective)
        limits = dict.fromkeys(self.solver.demands.limit_bytes, limit_bytes)
        other.solver = self.solver.under(replace(self.solver.demands, limit_bytes=limits))
        other.bounds = bounds_of(other.solver.questions, objective)
        return other

    def least(self) -> Candidate | None:
        """Return the best candidate, or None."""
        found = best_first(self.roots(), self.expand).found
        return found[0].leaf if found else None
