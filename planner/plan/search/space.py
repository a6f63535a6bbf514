"""Enumerates the arrangements of a training: degrees, microbatch, schedule, ZeRO, as a tree.

The first branch of a point is (degrees, microbatch); its variants differ in schedule, stages per
rank, ZeRO level and shard degree only, so that they share every layer's layout and cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.schedules.table import SCHEDULES, PipelineShape, ScheduleKind, refusal
from autopar.planner.precision import Precision

STAGES_PER_RANK = (1, 2, 4)  # more make the bubble little smaller, and transfers many more
DEFAULT_BUCKET_BYTES = 25 * 2**20  # what DDP takes; tuned for the plans that are solved


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the variants of a point may differ in."""

    schedules: tuple[ScheduleKind, ...]
    zero_levels: tuple[Zero, ...]
    compressed: tuple[bool, ...]
    stages_per_rank: int | None  # pinned
    shard: int | None  # pinned
    node_devices: int  # of the smallest node
    layers: int


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def microbatches_of(global_batch: int, data: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (rows of a microbatch, microbatches of a data rank)."""
    if global_batch % data:
        return ()
    rows = global_batch // data
    return tuple((size, rows // size) for size in divisors(rows))


def uneven_microbatches_of(global_batch: int, data: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the rows of a microbatch of each data rank, and how many there are, smallest first.

    Only where data ranks cannot have as many rows each: they have as alike numbers as can be.
    """
    for microbatches in reversed(divisors(global_batch) if global_batch % data else ()):
        least, more = divmod(global_batch // microbatches, data)
        if least:
            yield (least + 1,) * more + (least,) * (data - more), microbatches


def simplest(
    *, pipeline: int, data: int, tensor: int, microbatch: int, microbatches: int,
    precision: Precision,
) -> Arrangement:  # fmt: skip
    """Return a point before its variants are told apart."""
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
        compressed_gradients=False,
        precision=precision,
    )


def variants(point: Arrangement, choices: Choices) -> Iterator[Arrangement]:
    """Yield the arrangements of a point that torch can run."""
    for schedule, stages_per_rank in pipelines(point, choices):
        for zero, shard in sharding(point, choices):
            for compressed in choices.compressed if point.data > 1 else (False,):
                variant = replace(
                    point,
                    schedule=schedule,
                    stages_per_rank=stages_per_rank,
                    zero=zero,
                    shard=shard,
                    compressed_gradients=compressed,
                )
                if not shards_in_vain(variant):
                    yield variant


def shards_in_vain(arrangement: Arrangement) -> bool:
    """Whether ZeRO-2 or 3 would save nothing over ZeRO-1: a backward in halves keeps all whole.

    Its halves find parameters by their autograd nodes, which gathering them anew changes, and no
    hook sees the gradients that they make, until the last microbatch is done.
    """
    splits = arrangement.pipeline > 1 and SCHEDULES[arrangement.schedule].splits_backward
    return splits and arrangement.zero >= Zero.GRADIENTS


def pipelines(point: Arrangement, choices: Choices) -> Iterator[tuple[ScheduleKind, int]]:
    """Yield schedules with their stages per rank; without a pipeline there is nothing to choose."""
    if point.pipeline == 1:
        yield ScheduleKind.ONE_F_ONE_B, 1
        return
    for kind in choices.schedules:
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
    """Whether a simpler schedule does not do the same.

    Interleaving one stage per rank is none, and where 1F1B can run it takes the time of GPipe with
    less memory.
    """
    if choices.stages_per_rank is not None:
        return True
    if kind is ScheduleKind.INTERLEAVED_1F1B:
        return shape.stages_per_rank > 1
    if kind is ScheduleKind.INTERLEAVED_ZERO_BUBBLE:
        return shape.stages_per_rank <= 2  # there is no bubble left to make smaller
    plain = ScheduleKind.ONE_F_ONE_B
    if kind is ScheduleKind.GPIPE and plain in choices.schedules:
        return bool(refusal(plain, shape))
    return True


def sharding(point: Arrangement, choices: Choices) -> Iterator[tuple[Zero, int]]:
    """Yield ZeRO levels with their shard degree: all data ranks, or those of one node (HSDP).

    In a pipeline every microbatch would scatter its gradients under ZeRO-2, for a part of what
    ZeRO-3 saves, and HSDP has too few ranks to share: both are left out unless they are asked for.
    """
    inside = choices.node_devices // point.tensor
    is_plain = point.pipeline == 1 or len(choices.zero_levels) == 1 or choices.shard is not None
    for zero in choices.zero_levels:
        if zero is Zero.GRADIENTS and not is_plain:
            continue
        if zero is Zero.NONE:
            yield zero, point.data
        elif point.data > 1:
            degrees = {point.data}
            if (
                is_plain
                and zero >= Zero.GRADIENTS
                and 1 < inside < point.data
                and point.data % inside == 0
            ):
                degrees.add(inside)
            if choices.shard is not None:
                degrees = {choices.shard} if point.data % choices.shard == 0 else set()
            yield from ((zero, degree) for degree in sorted(degrees, reverse=True))
