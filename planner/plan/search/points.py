"""Lists the points of the search space and their variants (space.py); says how simple each is.

Also lists orders of unlike nodes, and distributes a batch over unlike devices. A step has m
microbatches, each of B rows over all data ranks; each of the n_k devices of kind k takes r_k of
these rows:

    Σ_k n_k · r_k  =  B        r_k ≥ the fewest rows that the model accepts

If there are few such distributions, all are tried. Otherwise those are tried whose slowest kind is
estimated to finish earliest. The time of a kind is interpolated in a line between its times for
one and for two even shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.planner.cluster.cluster import Cluster, Device
from autopar.planner.cluster.shape import RowShare, group_shape, kinds_of_blocks
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.prediction import Arrangement, Offload
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.stage_load import rank_groups
from autopar.planner.layers import Compile
from autopar.planner.plan.bounds.bounding import BoundKind, Bounds
from autopar.planner.plan.declared.constraints import Constraints, allows
from autopar.planner.plan.declared.limits import least_rows
from autopar.planner.plan.plan import BatchFacts
from autopar.planner.plan.search.best_first import Complexity
from autopar.planner.plan.search.space import (
    Choices,
    Degrees,
    check_degrees,
    divisors,
    may_share_unevenly,
    microbatches_of,
    sharding,
    simplest,
    uneven_microbatches_of,
    variants,
)
from autopar.planner.plan.solving.candidate import Candidate, recomputes
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.precision import Compression

MOST_SHARES = 6
MOST_LISTED = 10_000

Rows = Mapping[Device, int]
Seconds = Callable[[Device, int], float]  # of a number of rows, forward and backward


def uneven(
    point: Arrangement, cluster: Cluster, *, global_batch: int, least: int, seconds: Seconds
) -> Iterator[Arrangement]:
    """If a point has only data ranks, yield variants with rows that suit its unlike devices.

    `least` is the fewest rows of a microbatch.
    """
    if point.data != cluster.size:
        return
    counts = Counter(cluster.devices)  # slow for thousands of devices
    if len(counts) == 1:
        return
    for microbatches in divisors(global_batch):
        for rows in _shares(counts, global_batch // microbatches, least, seconds):
            each = tuple(rows[device] for device in cluster.devices)
            yield replace(point, microbatch=max(each), microbatches=microbatches, rows=each)


def _shares(
    counts: Counter[Device], block: int, least: int, seconds: Seconds
) -> Iterator[Mapping[Device, int]]:
    """Yield the best distributions of a microbatch's rows (`block`), except the even one."""
    found = [rows for rows in _every(counts, block, least) if len(set(rows.values())) > 1]
    if len(found) > MOST_SHARES:
        even = max(1, block // counts.total())
        times = {one: (seconds(one, even), seconds(one, 2 * even)) for one in counts}

        def slowest(rows: Rows) -> float:
            return max(
                once + (twice - once) * (rows[one] - even) / even
                for one, (once, twice) in times.items()
            )

        found = sorted(found, key=slowest)[:MOST_SHARES]
    yield from found


def _every(counts: Counter[Device], block: int, least: int) -> Iterator[Rows]:
    """Yield distributions of a microbatch's rows (`block`), up to a large number of them."""
    kinds = list(counts.items())

    def shared(place: int, left: int) -> Iterator[dict[Device, int]]:
        device, number = kinds[place]
        if place == len(kinds) - 1:
            if left % number == 0 and left >= least * number:
                yield {device: left // number}
            return
        later = least * sum(count for _, count in kinds[place + 1 :])
        for rows in range(least, (left - later) // number + 1):
            for rest in shared(place + 1, left - number * rows):
                yield {device: rows, **rest}

    for number, rows in enumerate(shared(0, block)):
        if number == MOST_LISTED:
            return
        yield rows


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """Degrees and microbatch; the variants are still open."""

    arrangement: Arrangement


@dataclass(frozen=True, slots=True)
class Variant:
    """An arrangement of which only the stages are still open.

    The `thriftier` arrangements need less memory, and are rarely faster: they come after it.
    """

    arrangement: Arrangement
    thriftier: tuple[Arrangement, ...] = ()
    bound_kind: BoundKind = BoundKind.UNSOLVED
    effort: int = 0  # how often it was solved with limited effort

    @property
    def family(self) -> tuple[Arrangement, ...]:
        """The arrangement and the thriftier ones."""
        return (self.arrangement, *self.thriftier)


SearchItem = SearchPoint | Variant


def families(variants_: Iterable[Arrangement]) -> list[list[Arrangement]]:
    """Return each variant alone, except ZeRO-2 and 3, which join the family of ZeRO-1.

    A family shares the schedule, the local steps and the number of ranks that average gradients.
    ZeRO-2 and 3 communicate more than ZeRO-1, but ZeRO-2 does so beside the forward, and neither
    holds whole sums of gradients. A variant with the optimizer on the host joins a
    family, too: its optimizer is slower, but the device adds up no gradients. A variant with the
    outer optimizer on the host joins the one that differs only in this.
    """
    heads: dict[tuple[object, ...], list[Arrangement]] = {}
    families = list[list[Arrangement]]()
    for one in variants_:
        local = one.sync_every, one.averaging_ranks if one.is_local else 0
        pipeline = one.schedule, one.stages_per_rank, one.compression, *local
        head, on_device = heads.get(pipeline), replace(one, offload=Offload.NONE)
        if one.offload.has_outer and families and families[-1][-1] == on_device:
            families[-1].append(one)
            continue
        if one.reduces_each and head is not None:
            head.append(one)
            continue
        family = [one]
        if one.zero.gathers_updated or one.averaging_ranks == 1:
            heads[pipeline] = family
        families.append(family)
    return families


def complexity(arrangement: Arrangement, *, recomputes: bool) -> Complexity:
    """Return how hard a plan is to read and to trust, most important first.

    In this order: how many replicas take local steps, which change what is learnt; how many kinds
    of parallelism there are; how many of them need printed forwards (pipeline and tensor: data
    ranks run the model's own forward); the ZeRO level; whether the host has an optimizer; how
    gradients are compressed; whether a layer is recomputed; whether layers are compiled.
    """
    opening = (arrangement.pipeline > 1) + (arrangement.tensor > 1)
    return (
        arrangement.data // arrangement.averaging_ranks - 1,
        opening + (arrangement.data > 1),
        opening,
        arrangement.zero.value,
        int(arrangement.offload is not Offload.NONE),
        [*Compression].index(arrangement.compression),
        int(recomputes),
        [*Compile].index(arrangement.compile),
    )


def complexity_of(candidate: Candidate) -> Complexity:
    """Return the complexity of a solved plan."""
    return complexity(candidate.arrangement, recomputes=recomputes(candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestByComplexity:
    """The least seconds of solved plans, by complexity."""

    tolerance: float
    seconds: Mapping[Complexity, float] = field(default_factory=dict)

    def with_one(self, of: Complexity, seconds: float) -> BestByComplexity:
        """Return the record with one more solved plan."""
        least = min(seconds, self.seconds.get(of, float("inf")))
        return replace(self, seconds={**self.seconds, of: least})

    @property
    def fastest(self) -> float:
        """The least seconds of all."""
        return min(self.seconds.values(), default=float("inf"))

    def words(self, least_bound: float) -> str:
        """Return how fast the best plan is so far, and how much a faster one may gain."""
        if self.fastest == float("inf"):
            return "searching"
        left = max(0.0, 1 - least_bound / self.fastest)
        return f"searching: {seconds_text(self.fastest)} so far, at most {left:.1%} left to gain"

    def to_beat(self, of: Complexity) -> float:
        """Return the time that a plan must be below to be chosen.

        The plan must be within the tolerance of the fastest, and faster than every plan that is at
        least as simple.
        """
        as_simple = (seconds for known, seconds in self.seconds.items() if known <= of)
        return min(self.fastest * (1 + self.tolerance), *as_simple, float("inf"))


def simplicity(arrangement: Arrangement) -> tuple[float, ...]:
    """Return the key that orders equally good arrangements: simplest first, then fewest ranks."""
    return (
        *complexity(arrangement, recomputes=False),
        arrangement.pipeline,
        arrangement.tensor,
        arrangement.data,
        arrangement.stages_per_rank,
        arrangement.microbatches,
        len(set(arrangement.rows)),
        arrangement.data // arrangement.shard,
        arrangement.sync_every,
        list(ScheduleKind).index(arrangement.schedule),
    )


def in_orders(
    point: Arrangement, orders: Sequence[Cluster], choices: Choices
) -> Iterator[Arrangement]:
    """Yield the point in every order of nodes whose groups differ from earlier orders.

    Layouts are solved for the tensor groups of the first order, so orders with other tensor groups
    are left out.
    """
    seen: set[object] = set()
    shape = group_shape(orders[0], point.tensor, 1)
    for number, cluster in enumerate(orders):
        placed = replace(point, order=number)
        groups = _groups(placed, cluster, choices)
        if groups not in seen and group_shape(cluster, point.tensor, 1) == shape:
            seen.add(groups)
            yield placed


def _groups(point: Arrangement, cluster: Cluster, choices: Choices) -> object:
    """Return everything in an order of nodes that affects a prediction."""
    shards = sorted({shard for _, shard in sharding(point, choices)} | {point.data})
    return (
        kinds_of_blocks(cluster, point.pipeline),
        *(rank_groups(cluster, replace(point, shard=shard)) for shard in shards),
    )


@dataclass(frozen=True, kw_only=True)  # no slots, because of cached properties
class Points:
    """The degrees and microbatches that the constraints allow."""

    subject: SearchSubject
    cluster: Cluster
    constraints: Constraints  # with a global batch
    choices: Choices
    orders: Sequence[Cluster]  # of unlike nodes; the planned order is first
    bounds: Bounds
    bucket_bytes: int

    def __iter__(self) -> Iterator[Arrangement]:
        legal = check_degrees(self.cluster.size, self.constraints, self._batch)
        layers = len(self.subject.layers.layers)
        for pipeline, data, tensor in legal:
            if pipeline <= layers and tensor <= self._most_tensor():
                for one in self.choices.compiles:
                    if not one.fuses_messages or 1 < tensor <= self.choices.node_devices:
                        yield from self._of_degrees((pipeline, data, tensor), one)

    def _of_degrees(self, degrees: Degrees, compile_: Compile) -> Iterator[Arrangement]:
        pipeline, data, tensor = degrees
        microbatches = self._microbatches(data)
        for each, count in microbatches:
            point = simplest(
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                microbatch=max(each),
                microbatches=count,
                precision=self.constraints.precision,
                compile_=compile_,
                float8=self.constraints.float8,
            )
            rows = each if len(set(each)) > 1 else ()
            yield from in_orders(replace(point, rows=rows), self.orders, self.choices)
        if microbatches and self._may_suit_devices:
            yield from self._uneven(point)

    def _microbatches(self, data: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the allowed microbatches: rows on each data rank, and their number.

        For the least memory only two are tried: the smallest one, because none has fewer rows in
        flight, and the whole batch, because a step of one microbatch adds up no gradients.
        """
        constraints, fixed = self.constraints, self._batch.fixed
        assert constraints.global_batch is not None
        least = self._least_rows[data > 1]
        even = microbatches_of(constraints.global_batch, data)
        every = [((size,) * data, count) for size, count in even]
        if may_share_unevenly(constraints, self._batch):
            every += uneven_microbatches_of(constraints.global_batch, data)
        allowed = [
            (each, count)
            for each, count in every
            if {fixed, constraints.microbatch} <= {None, max(each)}
            if min(each) >= least
            if count == 1 or not constraints.one_microbatch
        ]
        if not self.constraints.objective.memory_alone:
            return allowed
        return [*allowed[:1], *(one for one in allowed[1:] if one[1] == 1)]

    @cached_property
    def _batch(self) -> BatchFacts:
        return BatchFacts.of(self.subject.graph)

    @cached_property
    def _least_rows(self) -> tuple[int, int]:
        """The fewest rows of a microbatch on one data rank, and on several."""
        graph = self.subject.graph
        return least_rows(graph, data=1), least_rows(graph, data=2)

    @property
    def _may_suit_devices(self) -> bool:
        """Whether unlike devices may have unlike numbers of rows."""
        return (
            self.constraints.microbatch is None
            and not self.constraints.objective.memory_alone
            and self._batch.may_be_uneven
        )

    def _uneven(self, point: Arrangement) -> Iterator[Arrangement]:
        """Yield a point with rows that suit unlike devices."""
        assert self.constraints.global_batch is not None
        return uneven(
            point,
            self.orders[0],
            global_batch=self.constraints.global_batch,
            least=self._least_rows[True],
            seconds=lambda device, rows: (
                self.bounds.least_on(point, RowShare(device, rows)).total_seconds
            ),
        )

    def _most_tensor(self) -> int:
        """Return the largest tensor degree: the largest node's devices, unless another is demanded.

        Beyond a node's links the tensor axis would wait for the network in every layer. If it may
        split the batch, it may have all devices.
        """
        wanted = self.constraints.tensor or self.constraints.max_tensor
        if wanted is None and self.constraints.shares_rows:
            return self.cluster.size
        return wanted or max(node.devices for node in self.cluster.nodes)

    def variants(self, point: Arrangement) -> Iterator[Arrangement]:
        """Yield the variants of a point that the constraints allow."""
        for variant in variants(point, self.choices):
            one = replace(variant, bucket_bytes=self.bucket_bytes)
            rows = min(one.rows or (one.microbatch,))
            has_rows = rows >= self._least_rows[one.averaging_ranks > 1]
            if has_rows and allows(self.constraints, one):
                yield one

    def enumerated(self) -> int:
        """Return the number of arrangements."""
        return sum(len(tuple(self.variants(point))) for point in self)
