"""Enumerates the arrangements of a training as a tree: degrees, microbatch, schedule, ZeRO.

The first level has points: degrees, a microbatch, and whether layers are compiled. A point's
variants differ in schedule, stages per rank, ZeRO level, shard degree, compression, offload and
local steps. None of these changes layouts or costs inside layers, so variants share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, log

from autopar.planner.costs.prediction import Arrangement, Offload, Zero
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, refusal
from autopar.planner.costs.steps.state import loses_unkept, offloads_wrongly, shards_in_vain
from autopar.planner.errors import InfeasibleError
from autopar.planner.layers import Compile
from autopar.planner.plan.declared.constraints import (
    CHOICES,
    Constraints,
    Declared,
    conflict_text,
    constraints_of,
    local_steps,
    minimal_conflict,
)
from autopar.planner.plan.plan import BatchFacts
from autopar.planner.precision import Compression, Float8, Outer, Precision

Degrees = tuple[int, int, int]  # pipeline, data, tensor
_MOST_LISTED = 6
ROWS = "batch"  # the name of the rows' axis


UNKNOWN_BATCH = BatchFacts()


def legal_degrees(
    devices: int, constraints: Constraints, batch: BatchFacts = UNKNOWN_BATCH
) -> tuple[Degrees, ...]:
    """Return the allowed degrees whose product is the number of devices."""
    triples = (
        (pipeline, devices // pipeline // tensor, tensor)
        for pipeline in divisors(devices)
        for tensor in divisors(devices // pipeline)
    )
    return tuple(
        degrees
        for degrees in triples
        if _is_allowed(degrees, constraints) and _takes_batch(degrees, constraints, batch)
    )


def _is_allowed(degrees: Degrees, constraints: Constraints) -> bool:
    pins = (constraints.pipeline, constraints.data, constraints.tensor)
    most = (constraints.max_pipeline, constraints.max_data, constraints.max_tensor)
    return (
        all(pin in (None, degree) for pin, degree in zip(pins, degrees, strict=True))
        and all(top is None or degree <= top for top, degree in zip(most, degrees, strict=True))
        and (constraints.shard is None or degrees[1] % constraints.shard == 0)
        and (1 in local_steps(constraints) or degrees[1] > (constraints.shard or 1))
    )


def _takes_batch(degrees: Degrees, constraints: Constraints, batch: BatchFacts) -> bool:
    rows, pinned = constraints.global_batch, constraints.microbatch
    if rows is None or rows % _rows(degrees, constraints, batch) == 0:
        return True
    uneven = (
        uneven_microbatches_of(rows, degrees[1]) if may_share_unevenly(constraints, batch) else ()
    )
    return any(pinned in (None, max(each)) for each, _ in uneven)


def may_share_unevenly(constraints: Constraints, batch: BatchFacts) -> bool:
    """Whether data ranks may have unlike numbers of rows.

    Printed code that splits the batch over tensor ranks needs equal numbers.
    """
    splits_rows = constraints.shares_rows or any(
        rule.axis == ROWS and rule.is_required for rule in constraints.splits
    )
    return batch.may_be_uneven and batch.fixed is None and not splits_rows


def _rows(degrees: Degrees, constraints: Constraints, batch: BatchFacts) -> int:
    """Return the number of rows that a global batch must be a multiple of."""
    return degrees[1] * lcm(constraints.microbatch or 1, batch.fixed or 1)


def check_degrees(
    devices: int, constraints: Constraints, batch: BatchFacts = UNKNOWN_BATCH
) -> tuple[Degrees, ...]:
    """Return the legal degrees; if there are none, raise an error that names the conflict."""

    def is_feasible(declared: Sequence[Declared]) -> bool:
        return allow_degrees(declared, devices, batch)

    if is_feasible(constraints.declared):
        return legal_degrees(devices, constraints, batch)
    conflict = minimal_conflict(constraints.declared, is_feasible)
    raise _contradiction(devices, constraints, conflict, batch)


def allow_degrees(
    declared: Sequence[Declared], devices: int, batch: BatchFacts = UNKNOWN_BATCH
) -> bool:
    """Whether declarations together leave degrees, a microbatch and every other choice."""
    chosen = constraints_of(declared)
    has_microbatch = batch.fixed is None or chosen.microbatch in (None, batch.fixed)
    has_choices = bool(chosen.schedules and chosen.zero_levels and chosen.offloads)
    legal = legal_degrees(devices, chosen, batch)
    return has_microbatch and has_choices and bool(legal)


def _contradiction(
    devices: int,
    constraints: Constraints,
    conflict: tuple[Declared, ...],
    batch: BatchFacts,
) -> InfeasibleError:
    fields, why = {one.field for one in conflict}, _why(batch)
    found = f"on {devices} device{'s' * (devices > 1)} no plan satisfies {conflict_text(conflict)}"
    if fields <= CHOICES:
        fix = "together they leave no choice: allow one that all of them have"
        return InfeasibleError(found, fix=fix)
    if fields == {"microbatch"}:
        fix = f"pin microbatch={batch.fixed}, or leave it open"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields and batch.fixed == constraints.global_batch:
        fix = "allow pipeline or tensor ranks: a batch that stays whole has no data ranks"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields:
        near = _nearest_batches(devices, conflict, batch)
        fix = f"the nearest global batch that fits is {near}"
        return InfeasibleError(f"{found}{why}", fix=fix)
    rest = constraints_of(one for one in constraints.declared if one not in conflict)
    legal = legal_degrees(devices, rest) or legal_degrees(devices, Constraints())
    wanted = (constraints.pipeline, constraints.data, constraints.tensor)
    expected = f"legal are {_listed(nearest_degrees(legal, wanted))}"
    fix = "local steps need several replicas: take more data ranks" * ("sync_every" in fields)
    return InfeasibleError(found, expected=expected, fix=fix)


def _why(batch: BatchFacts) -> str:
    if batch.fixed is None:
        return ""
    place = f" at {batch.fixed_at}" if batch.fixed_at else ""
    return (
        f": the model fixes its batch to {batch.fixed}, the rows that it was traced with, because "
        f"its forward takes their number for a constant{place} (a loop over the rows, "
        "a root of their number, a comparison, tolist())"
    )


def _listed(legal: Sequence[Degrees]) -> str:
    more = f"; and {len(legal) - _MOST_LISTED} more" if len(legal) > _MOST_LISTED else ""
    return "; ".join(map(degrees_text, legal[:_MOST_LISTED])) + more


def _nearest_batches(devices: int, conflict: Sequence[Declared], batch: BatchFacts) -> str:
    """Return the batches nearest to the demanded one that the rest of the conflict allows."""
    wanted = constraints_of(conflict).global_batch
    assert wanted is not None
    others = constraints_of(one for one in conflict if one.field != "global_batch")
    legal = legal_degrees(devices, others, batch)
    units = {_rows(degrees, others, batch) for degrees in legal}
    below = max(wanted // unit * unit for unit in units)
    above = min(-(-wanted // unit) * unit for unit in units)
    return f"{below} or {above}" if below else str(above)


def nearest_degrees(
    legal: Sequence[Degrees], wanted: tuple[int | None, ...]
) -> tuple[Degrees, ...]:
    """Return legal degrees, those closest to the wanted ones first."""

    def distance(degrees: Degrees) -> tuple[int, float]:
        pairs = [(have, want) for have, want in zip(degrees, wanted, strict=True) if want]
        changed = sum(have != want for have, want in pairs)
        return changed, sum(abs(log(have / want)) for have, want in pairs)

    return tuple(sorted(legal, key=distance))


def degrees_text(degrees: Degrees) -> str:
    """Return degrees in the form of --pin: "pp=1,dp=2,tp=4"."""
    return f"pp={degrees[0]},dp={degrees[1]},tp={degrees[2]}"


STAGES_PER_RANK = (1, 2, 4)  # more hardly reduce the bubble, and multiply transfers
DEFAULT_BUCKET_BYTES = 25 * 2**20  # DDP's default; tuned for the plans that are solved


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices of a point's variants."""

    schedules: tuple[ScheduleKind, ...]
    zero_levels: tuple[Zero, ...]
    compressed: tuple[Compression, ...]
    compiles: tuple[Compile, ...]
    offloads: tuple[Offload, ...]
    stages_per_rank: int | None  # pinned
    shard: int | None  # pinned
    local_steps: tuple[int, ...]  # between two outer steps; 1: none
    outer: Outer
    outer_parts: int
    node_devices: int  # of the smallest node
    layers: int


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def microbatches_of(global_batch: int, data: int) -> tuple[tuple[int, int], ...]:
    """Return pairs: rows of a microbatch, microbatches of a data rank."""
    if global_batch % data:
        return ()
    rows = global_batch // data
    return tuple((size, rows // size) for size in divisors(rows))


def uneven_microbatches_of(global_batch: int, data: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the rows of a microbatch on each data rank, and the number of microbatches.

    The smallest microbatches come first. Their rows are as even as possible. If they can be equal,
    nothing is yielded.
    """
    for microbatches in reversed(divisors(global_batch) if global_batch % data else ()):
        least, more = divmod(global_batch // microbatches, data)
        if least:
            yield (least + 1,) * more + (least,) * (data - more), microbatches


def simplest(
    *, pipeline: int, data: int, tensor: int, microbatch: int, microbatches: int,
    precision: Precision, compile_: Compile, float8: Float8 = Float8.NONE,
) -> Arrangement:  # fmt: skip
    """Return a point in its simplest variant."""
    return Arrangement(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        shard=data,
        microbatch=microbatch,
        microbatches=microbatches,
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages_per_rank=1,
        zero=Zero.NONE,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        compression=Compression.NONE,
        precision=precision,
        compile=compile_,
        float8=float8,
    )


def variants(point: Arrangement, choices: Choices) -> Iterator[Arrangement]:
    """Yield the arrangements of a point that torch can run."""
    for sync_every in choices.local_steps:
        if sync_every == 1:
            yield from _variants(point, sharding(point, choices), choices)
        elif not point.precision.scales_loss:  # all ranks share the scale of the loss
            local = replace(point, sync_every=sync_every, outer=choices.outer)
            local = replace(local, outer_parts=choices.outer_parts)
            yield from _variants(local, _replicas(point, choices), choices)


def _variants(
    point: Arrangement, sharded: Iterable[tuple[Zero, int]], choices: Choices
) -> Iterator[Arrangement]:
    shared = tuple(sharded)
    for schedule, stages_per_rank in pipelines(point, choices):
        for zero, shard in shared:
            for compression in choices.compressed if point.data > 1 else (Compression.NONE,):
                for offload in choices.offloads:
                    variant = replace(
                        point,
                        schedule=schedule,
                        stages_per_rank=stages_per_rank,
                        zero=zero,
                        shard=shard,
                        compression=compression,
                        offload=offload,
                    )
                    if not (
                        shards_in_vain(variant)
                        or offloads_in_vain(variant, choices)
                        or loses_unkept(variant)
                    ):
                        yield variant


def offloads_in_vain(arrangement: Arrangement, choices: Choices) -> bool:
    """Whether an arrangement is useless or cannot run, because of its offload or ZeRO level.

    Without offload, ZeRO on a single data rank is useless. With offload, two things are useless
    unless the ZeRO level is demanded: several data ranks without ZeRO (with it, each steps faster
    and holds less), and ZeRO-2 (ZeRO-3 frees more memory). Two cannot run: fully_shard over groups
    of one rank, and split backwards, which call no hooks that send gradients to the host.
    """
    if offloads_wrongly(arrangement):
        return True
    if not arrangement.offload.has_states:
        return arrangement.data == 1 and arrangement.zero.divides_optimizer
    zero, is_free = arrangement.zero, len(choices.zero_levels) > 1
    is_beaten = zero.keeps_gathered or not (zero.divides_optimizer or arrangement.data == 1)
    is_whole = zero.shards_modules and arrangement.shard == 1 < arrangement.data
    splits = arrangement.pipeline > 1 and SCHEDULES[arrangement.schedule].splits_backward
    return (is_free and is_beaten) or is_whole or splits


def pipelines(point: Arrangement, choices: Choices) -> Iterator[tuple[ScheduleKind, int]]:
    """Yield schedules with their stages per rank; there is one choice without a pipeline."""
    if point.pipeline == 1:
        yield ScheduleKind.ONE_F_ONE_B, 1
        return
    for kind in choices.schedules:
        if point.compile.takes_layers and SCHEDULES[kind].splits_backward:
            continue  # the backward of a compiled layer is one function
        pinned = choices.stages_per_rank
        for stages_per_rank in STAGES_PER_RANK if pinned is None else (pinned,):
            if stages_per_rank * point.pipeline > choices.layers:
                break
            shape = PipelineShape(
                ranks=point.pipeline,
                stages_per_rank=stages_per_rank,
                microbatches=point.microbatches,
            )
            if is_worthwhile(kind, shape, choices) and not refusal(kind, shape):
                yield kind, stages_per_rank


def is_worthwhile(kind: ScheduleKind, shape: PipelineShape, choices: Choices) -> bool:
    """Whether no simpler schedule is as good; always true if the stages per rank are pinned.

    Interleaving needs several stages per rank, and GPipe takes the time of 1F1B with more memory.
    """
    if choices.stages_per_rank is not None:
        return True
    facts = SCHEDULES[kind]
    if facts.stages_per_rank is None and not facts.splits_backward:
        return shape.stages_per_rank > 1
    if facts.stages_per_rank is None:
        return shape.stages_per_rank <= 2  # there is no bubble left to reduce
    plain = ScheduleKind.ONE_F_ONE_B
    if kind is ScheduleKind.GPIPE and plain in choices.schedules:
        return bool(refusal(plain, shape))
    return True


def sharding(point: Arrangement, choices: Choices) -> Iterator[tuple[Zero, int]]:
    """Yield ZeRO levels with their shard degree: all data ranks, or those of a node (HSDP).

    In a pipeline, ZeRO-2 would scatter gradients for every microbatch and free less memory than
    ZeRO-3, and HSDP would shard over too few ranks: both are left out unless demanded. If
    compressed gradients may be exchanged, ZeRO-1 is also tried with a sharded copy in each node:
    then only the sums of nodes cross the network.
    """
    exchanges = any(one.keeps_lost and not one.is_low_rank for one in choices.compressed)
    inside = choices.node_devices // point.tensor
    is_plain = point.pipeline == 1 or len(choices.zero_levels) == 1 or choices.shard is not None
    for zero in choices.zero_levels:
        if zero.keeps_gathered and not is_plain:
            continue
        if not zero.divides_optimizer or _fetches_layers(point, zero, choices):
            yield zero, point.data
        elif point.data > 1:
            degrees = {point.data}
            is_inside = is_plain and (zero.shards_modules or exchanges)
            if is_inside and 1 < inside < point.data and point.data % inside == 0:
                degrees.add(inside)
            if choices.shard is not None:
                degrees = {choices.shard} if point.data % choices.shard == 0 else set()
            yield from ((zero, degree) for degree in sorted(degrees, reverse=True))


def _replicas(point: Arrangement, choices: Choices) -> Iterator[tuple[Zero, int]]:
    """Yield ZeRO levels with the data ranks of a replica: those of a node, or a single one.

    If only ZeRO levels that divide something are allowed, a replica may also be a part of a node.
    """
    inside, levels = choices.node_devices // point.tensor, choices.zero_levels
    must_divide = all(one.divides_optimizer for one in levels)
    degrees = divisors(inside) if must_divide and inside else (1, inside)
    for degree in sorted({choices.shard} if choices.shard else set(degrees), reverse=True):
        if 0 < degree < point.data and point.data % degree == 0:
            yield from ((one, degree) for one in levels if degree > 1 or not one.divides_optimizer)


def _fetches_layers(point: Arrangement, zero: Zero, choices: Choices) -> bool:
    """Whether a single device may have its parameters on the host, and fetch each layer."""
    may_offload = any(one.has_states for one in choices.offloads)
    return point.ranks == 1 and zero.divides_parameters and may_offload
