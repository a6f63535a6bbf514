"""Makes small questions for the stage program, and answers them by pricing everything there is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from random import Random

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute, Zero
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.paths import Chains, first_chains
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, refusal
from autopar.planner.costs.steps.framework import read_framework_constants
from autopar.planner.costs.steps.stage_load import rank_groups
from autopar.planner.costs.steps.step import predict
from autopar.planner.programs.stages.choice import EXACT, Chooser, Effort, StageAnswer, answered
from autopar.planner.programs.stages.question import StageQuestion
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT

MODES = tuple(Recompute)
STAGES_PER_RANK = {
    ScheduleKind.GPIPE: (1,),
    ScheduleKind.ONE_F_ONE_B: (1,),
    ScheduleKind.ZERO_BUBBLE_V: (2,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """A question with the cluster that it is about."""

    question: StageQuestion
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The best of all cuts, modes and sizes of buckets that fit; infinite where none does."""

    seconds: float
    least_bytes: int  # of the fullest rank, whatever is allowed


def random_modes(random: Random) -> Modes:
    """Return a layer in its modes; recomputing takes longer and keeps less."""
    forward = random.uniform(1e-3, 4e-3)
    backward = 2 * forward * random.uniform(0.8, 1.2)
    parameters = random.randint(1, 40) * 100_000
    saved = random.randint(50, 300) * 1_000_000
    transient = random.randint(1, 100) * 1_000_000
    plain = replace(
        LAYER,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_gradient_seconds=backward * random.uniform(0.3, 0.5),
        saved_bytes=saved,
        transient_bytes=transient,
        output_bytes=random.randint(1, 8) * 1_000_000,
        parameters=parameters,
        trainable=parameters,
        trainable_tensors=1 + parameters % 7,
        parameter_bytes=2 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=12 * parameters,
        replicated_gradient_bytes=4 * parameters // (1 + parameters % 3),
        learning_bytes=transient - saved // 2,
        learned_gradient_bytes=4 * parameters,
        deferred_bytes=random.randint(0, 20) * 1_000_000,
    )
    return {
        Recompute.NONE: plain,
        Recompute.SELECTIVE: again(plain, share=0.1, kept=0.6, more=saved // 3),
        Recompute.FULL: again(plain, share=1.0, kept=0.1, more=saved),
        Recompute.CHUNKED: plain,
        Recompute.HOST: plain,
        Recompute.FULL_HOST: plain,
    }


def with_chunks(modes: Modes) -> Modes:
    """Return a layer whose loss can be made in chunks: less work space for a little time."""
    plain = modes[Recompute.NONE]
    less = -2 * plain.transient_bytes // 3
    return {**modes, Recompute.CHUNKED: again(plain, share=0.03, kept=0.9, more=less)}


def with_host(modes: Modes) -> Modes:
    """Return a layer that can save on the host: little stays, and all comes back while it runs."""
    plain = modes[Recompute.NONE]
    there = again(plain, share=0.08, kept=0.0, more=plain.saved_bytes)
    waits = there.recompute_seconds
    there = replace(there, host_saved_bytes=plain.saved_bytes, host_wait_seconds=waits)
    full, waits = modes[Recompute.FULL], 0.01 * plain.forward_seconds
    inputs = replace(
        full,
        backward_seconds=full.backward_seconds + waits,
        recompute_seconds=full.recompute_seconds + waits,
        saved_bytes=0,
        transient_bytes=full.transient_bytes + full.saved_bytes,
        learning_bytes=full.learning_bytes + full.saved_bytes,
        host_saved_bytes=full.saved_bytes,
        host_wait_seconds=waits,
    )
    return {**modes, Recompute.HOST: there, Recompute.FULL_HOST: inputs}


def on_host(case: StageCase) -> StageCase:
    """Return a case whose layers can save on the host; equal layers stay one object."""
    (row,) = {id(row): row for row in case.question.rows}.values()
    changed = {id(modes): with_host(modes) for modes in row}
    rows = (tuple(changed[id(modes)] for modes in row),) * len(case.question.rows)
    return replace(case, question=replace(case.question, rows=rows))


def again(plain: LayerCost, *, share: float, kept: float, more: int) -> LayerCost:
    """Return a layer that computes a share of its forward again, and keeps a share."""
    recomputed = plain.forward_seconds * share
    return replace(
        plain,
        backward_seconds=plain.backward_seconds + recomputed,
        recompute_seconds=recomputed,
        saved_bytes=int(plain.saved_bytes * kept),
        transient_bytes=plain.transient_bytes + more,
        learning_bytes=plain.learning_bytes + more,
        deferred_bytes=0,
    )


def random_case(seed: int, *, kind: ScheduleKind, most_layers: int, room: float) -> StageCase:
    """Return a small case; `room` is memory, as a share of what an even cut needs as it is."""
    random = Random(seed)
    ranks = random.choice((2, 2, 3)) if most_layers > 4 else 2
    several = random.choice(STAGES_PER_RANK.get(kind, (1, 2)))
    microbatches = ranks * random.choice((1, 2, 3, 5))
    data = random.choice((1, 2, 4)) if ranks == 2 else random.choice((1, 2))
    shape = PipelineShape(ranks=ranks, stages_per_rank=several, microbatches=microbatches)
    assert not refusal(kind, shape)
    arrangement = replace(
        ARRANGEMENT,
        pipeline=ranks,
        data=data,
        shard=data,
        microbatches=microbatches,
        schedule=kind,
        stages_per_rank=several,
        zero=_zero(random, kind, data),
        bucket_bytes=2_000_000,
    )
    count = random.randint(max(ranks * several, 3), max(most_layers, ranks * several))
    return _case(random, arrangement, random_row(random, count), room)


def equal_case(arrangement: Arrangement, plain: LayerCost, *, room: float = 2.0) -> StageCase:
    """Return a case of 24 equal layers, which can save on the host, on `arrangement`."""
    modes = with_host(dict.fromkeys(MODES, plain))
    case = _case(Random(0), arrangement, (modes,) * 24, room)
    constants = replace(read_framework_constants(), fuses_gradients=False)
    question = replace(case.question, constants=constants, bucket_bytes=(2_000_000,))
    return replace(case, question=replace(question, tied_gradient_bytes=0))


def whole_case(seed: int, *, zero: Zero, layers: int, room: float) -> StageCase:
    """Return a small case without a pipeline."""
    random = Random(seed)
    data = 1 if zero is Zero.NONE and random.random() < 0.5 else random.choice((2, 4))
    arrangement = replace(
        ARRANGEMENT,
        data=data,
        shard=data,
        microbatches=random.choice((1, 3)),
        zero=zero if data > 1 else Zero.NONE,
        bucket_bytes=2_000_000,
    )
    return _case(random, arrangement, random_row(random, layers), room)


def uneven_case(seed: int, *, room: float) -> StageCase:
    """Return a case of four ranks without recomputation: the first have room for few layers."""
    random = Random(seed)
    arrangement = replace(
        ARRANGEMENT, pipeline=4, microbatches=4, schedule=ScheduleKind.ONE_F_ONE_B,
        bucket_bytes=2_000_000,
    )  # fmt: skip
    case = _case(random, arrangement, random_row(random, 9), room)
    row = {id(one): dict.fromkeys(MODES, one[Recompute.NONE]) for one in case.question.rows[0]}
    rows = (tuple(row[id(one)] for one in case.question.rows[0]),) * 4
    return replace(case, question=replace(case.question, rows=rows))


def _zero(random: Random, kind: ScheduleKind, data: int) -> Zero:
    if data == 1:
        return Zero.NONE
    levels = [Zero.NONE, Zero.OPTIMIZER]
    if not SCHEDULES[kind].splits_backward:
        levels.append(Zero.PARAMETERS)
    return random.choice(levels)


def random_row(random: Random, count: int) -> tuple[Modes, ...]:
    """Return layers of two or three kinds in the middle and at the ends."""
    ends, middle = [with_chunks(random_modes(random)) for _ in range(2)], random_modes(random)
    other = random_modes(random) if random.random() < 0.4 else middle
    return (
        ends[0],
        *(random.choice((middle, other)) for _ in range(count - 2)),
        random.choice((ends[1], middle)),
    )


def _case(
    random: Random, arrangement: Arrangement, row: tuple[Modes, ...], room: float
) -> StageCase:
    cluster = choose_cluster(arrangement.ranks, "a100-80gb-sxm")
    silent = replace(SILENT, fuses_gradients=False)
    constants = random.choice((silent, read_framework_constants()))
    plain = [[one[Recompute.NONE] for one in part] for part in _even(row, arrangement)]
    peak = predict(plain, arrangement, cluster, constants=constants, model_flops=1).peak_memory
    return StageCase(
        question=StageQuestion(
            arrangement=arrangement,
            groups=rank_groups(cluster, arrangement),
            constants=constants,
            rows=(row,) * arrangement.pipeline,
            allowed=(frozenset(Recompute),) * len(row),
            is_cuttable=(True,) * len(row),
            pins=(),
            limit_bytes=(int(peak.device_bytes * room),) * arrangement.pipeline,
            tied_gradient_bytes=random.choice((0, 1_000_000)),
            bucket_bytes=random.choice(((2_000_000,), (2_000_000, 8_000_000))),
        ),
        cluster=cluster,
    )


def _even(row: tuple[Modes, ...], arrangement: Arrangement) -> Iterator[tuple[Modes, ...]]:
    stages = arrangement.pipeline * arrangement.stages_per_rank
    borders = [number * len(row) // stages for number in range(stages + 1)]
    return (row[first:stop] for first, stop in pairwise(borders))


@dataclass(frozen=True, slots=True)
class Price:
    """What one way to run all stages comes to."""

    seconds: float
    needed_bytes: int  # of the fullest rank


def brute_force(case: StageCase) -> Truth:
    """Return the best of all ways to run a case's stages."""
    return best_within(case, prices(case))


def best_within(case: StageCase, priced: Iterable[Price]) -> Truth:
    """Return the best of these ways that fits into the memory of a case."""
    best, least = math.inf, 1 << 60
    for one in priced:
        least = min(least, one.needed_bytes)
        if one.needed_bytes <= case.question.limit_bytes[0]:
            best = min(best, one.seconds)
    return Truth(seconds=best, least_bytes=least)


def prices(case: StageCase) -> Iterator[Price]:
    """Price every cut in every mix of modes with every size of buckets, by the prediction.

    Of equal layers in a stage those that keep most come first, or last where a step is one pass:
    the order is no choice of a plan.
    """
    question = case.question
    count, stages = len(question.allowed), question.shape.stages
    for inner in combinations(range(1, count), stages - 1):
        cut = (0, *inner, count)
        for parts in product(*(_ways(question, *ends) for ends in pairwise(cut))):
            for size in question.bucket_bytes:
                found = predict(
                    parts,
                    replace(question.arrangement, bucket_bytes=size),
                    case.cluster,
                    constants=question.constants,
                    model_flops=1,
                    tied_gradient_bytes=question.tied_gradient_bytes,
                )
                yield Price(found.step_seconds, found.peak_memory.device_bytes)


def _ways(question: StageQuestion, first: int, stop: int) -> list[list[LayerCost]]:
    """Return the ways to run some layers as a stage."""
    row = question.rows[0][first:stop]
    order = -1 if question.arrangement.is_one_pass else 1
    return [
        [one[mode] for one, mode in zip(row, modes, strict=True)]
        for modes in product(*map(different, row))
        if _keeps_most_first(row[::order], modes[::order])
    ]


def different(modes: Modes) -> list[Recompute]:
    """Return the modes that differ in cost."""
    plain = modes[Recompute.NONE]
    return [mode for mode in MODES if mode is Recompute.NONE or modes[mode] is not plain]


def _keeps_most_first(row: tuple[Modes, ...], modes: tuple[Recompute, ...]) -> bool:
    before: dict[int, int] = {}
    for one, mode in zip(row, modes, strict=True):
        place = MODES.index(mode)
        if place < before.get(id(one), 0):
            return False
        before[id(one)] = place
    return True


def choose_stages(
    question: StageQuestion, *, cutoff_seconds: float = math.inf, effort: Effort = EXACT
) -> StageAnswer:
    """Return the best cut of the layers into stages, with its modes, and a bound of all cuts."""
    chains = Chains(first_chains(question.arrangement.schedule, question.shape))
    chooser = Chooser(question, effort, chains)
    chooser.ask(cutoff_seconds, effort)
    return answered(chooser)
