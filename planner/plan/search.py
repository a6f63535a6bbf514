"""Chooses the plan: a best-first search over arrangements, each solved by the integer programs.

    degrees × microbatch        bounded by ops split in their fastest way, with free communication
      └ layouts are solved, then: schedule × stages per rank × ZeRO × shard
                                bounded by the layers as laid out, gathering, reducing, updating
          └ stages are solved   an exact prediction

The first prediction that no bound undercuts is the best there is in this space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.planner.axes.infer import Axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.costs.framework import framework_constants
from autopar.planner.costs.measurements import Measurements
from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.schedule import ScheduleKind
from autopar.planner.errors import AutoparError, InfeasibleError, TimeLimitError
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.plan.assembly import Counts, assemble
from autopar.planner.plan.bounding import Bounds
from autopar.planner.plan.best_first import Found, Node, Outcome, best_first
from autopar.planner.plan.candidate import Candidate, Judge, inside_of, recomputes
from autopar.planner.plan.constraints import Constraints, Objective, allows
from autopar.planner.plan.costing import Costing, Subject, model_flops
from autopar.planner.plan.degrees import check_degrees
from autopar.planner.plan.demands import choices_of, demands_of, layout_rules
from autopar.planner.plan.plan import Model, Plan
from autopar.planner.plan.space import Choices, microbatches_of, simplest, variants
from autopar.planner.plan.words import arrangement_words, degrees_words

ROWS_PER_DEVICE = 8  # of the global batch, where none is declared
MOST_RUNNERS_UP = 4
EXTRA_SECONDS = 0.5  # for runners-up, once the best is proved


@dataclass(frozen=True, slots=True)
class Point:
    """Degrees and microbatch, the variants still open."""

    arrangement: Arrangement


@dataclass(frozen=True, slots=True)
class Variant:
    """A whole arrangement, the stages still open; `thriftier` ones can only be better in memory."""

    arrangement: Arrangement
    thriftier: tuple[Arrangement, ...] = ()


Item = Point | Variant
Searched = Outcome[Item, Candidate]


def search(
    graph: Graph,
    axes: Axes,
    layers: Layers,
    model: Model,
    cluster: Cluster,
    constraints: Constraints,
    *,
    time_limit_seconds: float | None = None,
    report: Callable[[str], None] = lambda _: None,
    measured: Measurements | None = None,
) -> Plan:
    """Return the best plan with its proof and the runners-up."""
    subject = Subject(graph=graph, axes=axes, layers=layers)
    constraints = with_batch(constraints, cluster, graph)
    explorer = Explorer(subject, cluster, constraints, report=report, measured=measured)
    began = time.perf_counter()
    limit = time_limit_seconds or float("inf")
    outcome = explorer.explore(is_late=lambda: time.perf_counter() - began > limit)
    if not outcome.found:
        raise explorer.refusal(outcome)
    return assemble(
        outcome,
        costing=explorer.costing,
        model=model,
        constraints=constraints,
        limit_bytes=min(explorer.judge.demands.limit_bytes.values()),
        counts=Counts(
            enumerated=explorer.enumerated(),
            solved=explorer.solved,
            infeasible=explorer.infeasible,
            programs=explorer.programs + explorer.costing.layout_report().calls,
            seconds=time.perf_counter() - began,
        ),
    )


def with_batch(constraints: Constraints, cluster: Cluster, graph: Graph) -> Constraints:
    """Return the constraints with a global batch: a few rows for each device where none is set."""
    if constraints.global_batch is not None:
        return constraints
    rows = ROWS_PER_DEVICE * cluster.size * (graph.fixed_batch or 1)
    pinned = constraints.microbatch or 1
    return replace(constraints, global_batch=rows * pinned)


class Explorer:
    """The tree of one search: its roots, how nodes expand, and what was counted on the way."""

    def __init__(
        self,
        subject: Subject,
        cluster: Cluster,
        constraints: Constraints,
        *,
        report: Callable[[str], None] = lambda _: None,
        measured: Measurements | None = None,
    ) -> None:
        assert constraints.global_batch is not None
        self.subject, self.cluster, self.constraints = subject, cluster, constraints
        self.objective = constraints.objective
        self.report = report
        self.choices: Choices = choices_of(subject, cluster, constraints)
        devices = (node.device for node in cluster.nodes)
        self.constants = framework_constants(devices, measured)
        self.costing = Costing(
            subject,
            cluster,
            precision=constraints.precision,
            rules=layout_rules(constraints, subject.axes),
            measured=measured,
        )
        self.judge = Judge(
            costing=self.costing,
            demands=demands_of(subject, cluster, constraints),
            constants=self.constants,
            model_flops=model_flops(subject, constraints.global_batch, constraints.precision),
        )
        self.bounds = Bounds(self.judge, self.objective)
        self.solved = 0
        self.infeasible = 0
        self.programs = 0
        self.shortfalls: list[tuple[int, Arrangement]] = []
        self._proved_at: float | None = None

    def explore(self, *, is_late: Callable[[], bool] = lambda: False) -> Searched:
        """Search until the best is proved and there are some distinct runners-up."""
        roots: list[Node[Item]] = [
            Node(bound=self.bounds.of_point(point), rank=simplicity(point), item=Point(point))
            for point in self.points()
        ]
        return best_first(roots, self.expand, is_late=is_late, enough=self._is_enough)

    def _is_enough(self, passed: int) -> bool:
        """Whether the best is proved, and there are others to compare it with."""
        if passed and self._proved_at is None:
            self._proved_at = time.perf_counter()
        if self._proved_at is None:
            return False
        return passed > MOST_RUNNERS_UP or time.perf_counter() - self._proved_at > EXTRA_SECONDS

    def points(self) -> Iterator[Arrangement]:
        """Yield the degrees and microbatches that the constraints allow."""
        constraints, fixed = self.constraints, self.subject.graph.fixed_batch
        assert constraints.global_batch is not None
        legal = check_degrees(self.cluster.size, constraints, fixed_batch=fixed)
        layers = len(self.subject.layers.layers)
        for pipeline, data, tensor in legal:
            if pipeline > layers or tensor > self.most_tensor():
                continue
            for size, count in microbatches_of(constraints.global_batch, data):
                if size == (fixed or size) and size == (constraints.microbatch or size):
                    yield simplest(
                        pipeline=pipeline,
                        data=data,
                        tensor=tensor,
                        microbatch=size,
                        microbatches=count,
                        precision=constraints.precision,
                    )

    def most_tensor(self) -> int:
        """Return the greatest tensor degree: the devices of a node, unless more is asked for.

        Beyond the links of a node the tensor axis would wait for the network in every layer.
        """
        wanted = self.constraints.tensor or self.constraints.max_tensor
        return wanted or max(node.devices for node in self.cluster.nodes)

    def enumerated(self) -> int:
        """Return how many arrangements the space has."""
        return sum(len(tuple(self.allowed_variants(point))) for point in self.points())

    def allowed_variants(self, point: Arrangement) -> Iterator[Arrangement]:
        """Yield the variants of a point that the constraints allow."""
        bucket = self.judge.demands.bucket_bytes[0]
        for variant in variants(point, self.choices):
            one = replace(variant, bucket_bytes=bucket)
            if allows(self.constraints, one):
                yield one

    def expand(self, item: Item) -> Iterable[Node[Item] | Found[Candidate]]:
        """Return the variants of a point, or the solution of a variant."""
        if isinstance(item, Point):
            self.report(f"laying out {degrees_words(item.arrangement)}")
            families = _families(self.allowed_variants(item.arrangement))
            return self._nodes(Variant(first, tuple(rest)) for first, *rest in families)
        self.report(f"solving {arrangement_words(item.arrangement)}")
        found = self.solve(item.arrangement)
        if found and not recomputes(found[0].leaf) and self.objective is not Objective.MEMORY:
            return found
        return [*found, *self._nodes(map(Variant, item.thriftier))]

    def _nodes(self, items: Iterable[Variant]) -> list[Node[Item]]:
        """Return the variants that memory does not rule out, with the bounds of their families."""
        nodes: list[Node[Item]] = []
        for item in items:
            family = (item.arrangement, *item.thriftier)
            bounds = {one: self.bounds.of_variant(one) for one in family}
            possible = [one for one in family if bounds[one] < float("inf")]
            ruled_out = [one for one in family if bounds[one] == float("inf")]
            self.infeasible += len(ruled_out)
            self.shortfalls += [(0, one) for one in ruled_out]
            if possible:
                first, *rest = possible
                bound = min(bounds[one] for one in possible)
                variant = Variant(first, tuple(rest))
                nodes.append(Node(bound=bound, rank=simplicity(first), item=variant))
        return nodes

    def solve(self, arrangement: Arrangement) -> list[Found[Candidate]]:
        """Return the best candidate of an arrangement, if there is one."""
        smallest = self.objective is Objective.MEMORY
        answer = (self.judge.solve_smallest if smallest else self.judge.solve)(arrangement)
        self.programs += answer.report.calls
        if answer.candidate is None:
            self.infeasible += 1
            if answer.shortfall_bytes is not None:
                self.shortfalls.append((answer.shortfall_bytes, arrangement))
            return []
        self.solved += 1
        candidate = answer.candidate
        return [Found(value=self.value(candidate), rank=simplicity(arrangement), leaf=candidate)]

    def value(self, candidate: Candidate) -> float:
        """Return what the objective has less of: bytes, or seconds (which money goes with)."""
        if self.objective is Objective.MEMORY:
            return float(candidate.prediction.peak_memory.device_bytes)
        return candidate.prediction.step_seconds

    def refusal(self, outcome: Searched) -> AutoparError:
        """Return why there is no plan: no time, or no memory, with the nearest change that fits."""
        if not outcome.is_complete:
            return TimeLimitError(
                "the time limit came before any plan was found",
                expected=f"{len(outcome.waiting)} arrangements were still open",
                fix="allow more time with --time-limit, or pin degrees with --pin",
            )
        if not self.shortfalls:
            return InfeasibleError(
                "no arrangement of these devices can run the model under the constraints",
                fix="loosen the pins, or use another number of devices",
            )
        short, arrangement = min(self.shortfalls, key=lambda pair: pair[0])
        limit = min(self.judge.demands.limit_bytes.values())
        return InfeasibleError(
            f"no plan fits: every one needs {bytes_text(limit + short)} or more on a device, "
            f"and {bytes_text(limit)} may be used ({bytes_text(short)} short)",
            where=f"the least is with {arrangement_words(arrangement)}",
            fix=self._nearest_change(limit + short),
        )

    def _nearest_change(self, needed_bytes: int) -> str:
        memory = min(node.device.memory_bytes for node in self.cluster.nodes)
        if needed_bytes <= memory:
            return f'allow more of the device: --memory "{bytes_text(needed_bytes)}"'
        return "take more devices, devices with more memory, or a smaller global batch"


def _families(variants_: Iterable[Arrangement]) -> list[list[Arrangement]]:
    """Return each variant alone, but ZeRO-2 and 3 behind the ZeRO-1 that they only save memory on.

    They communicate more than ZeRO-1 and update as fast, so where that fits as it is, they cannot
    be better.
    """
    heads: dict[tuple[object, ...], list[Arrangement]] = {}
    families = []
    for one in variants_:
        pipeline = one.schedule, one.stages_per_rank, one.compressed_gradients
        head = heads.get(pipeline)
        if one.zero >= Zero.GRADIENTS and head is not None:
            head.append(one)
            continue
        family = [one]
        if one.zero is Zero.OPTIMIZER:
            heads[pipeline] = family
        families.append(family)
    return families


def simplicity(arrangement: Arrangement) -> tuple[float, ...]:
    """Return what orders equals: fewer kinds of parallelism, less sharding, fewer parts."""
    degrees = (arrangement.pipeline, arrangement.tensor, arrangement.data)
    return (
        sum(degree > 1 for degree in degrees),
        arrangement.zero.value,
        arrangement.compressed_gradients,
        *degrees,
        arrangement.stages_per_rank,
        arrangement.microbatches,
        arrangement.data // arrangement.shard,
        list(ScheduleKind).index(arrangement.schedule),
    )
