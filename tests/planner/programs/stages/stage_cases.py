"""Random small stage problems, and what is best for each by trying everything."""

import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st

from autopar.planner.programs.stages.problem import (
    Cut,
    LayerChoices,
    LayerOption,
    LayerRun,
    Pin,
    StageLimit,
    StageLimits,
)
from autopar.planner.programs.stages.shares import Share, shares_of

Case = tuple[LayerChoices, StageLimits]
Stage = tuple[float, float]  # seconds, step seconds


def best_by_trying_all(choices: LayerChoices, limits: StageLimits) -> float | None:
    """Return the least objective over all cuts and all options of every layer, None if none fits.

    Within an interval of a stage only the two times of a choice of options matter to the whole, so
    the choices are tried interval by interval; nothing else is left out.
    """
    stages = len(limits.stages)
    shares = shares_of(choices, limits)
    inside = {
        (p, first, stop): _stage_times(choices, limits, (p, first, stop), shares[p])
        for p in range(stages)
        for first, stop in itertools.combinations(range(len(choices.layers) + 1), 2)
    }
    return min(
        (
            _objective(times, limits)
            for ends in _ways_to_cut(choices, stages)
            for times in itertools.product(
                *(inside[p, ends[p], ends[p + 1]] for p in range(stages))
            )
        ),
        default=None,
    )


def _ways_to_cut(choices: LayerChoices, stages: int) -> Iterator[tuple[int, ...]]:
    count = len(choices.layers)
    for inner in itertools.combinations(range(1, count), stages - 1):
        ends = (0, *inner, count)
        is_allowed = all(choices.boundaries[place].is_allowed for place in inner)
        is_pinned = all(
            pin.stage < stages and ends[pin.stage] <= pin.layer < ends[pin.stage + 1]
            for pin in choices.pins
        )
        if is_allowed and is_pinned:
            yield ends


def _stage_times(
    choices: LayerChoices, limits: StageLimits, at: tuple[int, int, int], share: Share
) -> set[Stage]:
    p, first, stop = at
    limit = limits.stages[p]
    after = limits.stages[p + 1].cut_scale if p + 1 < len(limits.stages) else 0.0
    cuts = (
        choices.boundaries[first].beginning_seconds * limit.cut_scale
        + choices.boundaries[stop].ending_seconds * after
    )
    groups = [choices.options[limit.device_class][c] for c in choices.layers[first:stop]]
    return {
        (cuts + math.fsum(o.seconds for o in way), math.fsum(o.step_seconds for o in way))
        for way in itertools.product(*groups)
        if _fits(way, limit, share)
    }


def _fits(way: tuple[LayerOption, ...], limit: StageLimit, share: Share) -> bool:
    kept = sum(
        option.fixed_bytes
        + limit.in_flight * option.saved_bytes
        + limit.deferred * option.deferred_bytes
        for option in way
    )
    transient = max(option.transient_bytes for option in way)
    if share.reserved_bytes is not None and transient > share.reserved_bytes:
        return False
    return kept + max(transient, share.reserved_bytes or 0) <= share.memory_bytes


def _objective(stages: tuple[Stage, ...], limits: StageLimits) -> float:
    """Return ((m·v − 1) · Σ T + Σ F) / v + Σ U, as the program states it."""
    v, ranks = limits.stages_per_rank, limits.ranks
    rounds = [stages[c * ranks : (c + 1) * ranks] for c in range(v)]
    slowest = sum(max(seconds for seconds, _ in one) for one in rounds)
    once = sum(max(step for _, step in one) for one in rounds)
    total = sum(seconds for seconds, _ in stages)
    return ((limits.microbatches * v - 1) * slowest + total) / v + once


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return layers of up to three classes on up to four stages, with memory that often binds."""
    classes = draw(st.integers(1, 3))
    widths = [draw(st.integers(1, 3)) for _ in range(classes)]
    devices = draw(st.integers(1, 2))
    options = tuple(
        tuple(tuple(draw(_options(k)) for k in range(width)) for width in widths)
        for _ in range(devices)
    )
    runs = tuple(
        LayerRun(layer_class=draw(st.integers(0, classes - 1)), count=draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 3)))
    )
    count = sum(run.count for run in runs)
    per_rank = draw(st.sampled_from([1, 1, 1, 2]))
    ranks = draw(st.integers(1, 4 if per_rank == 1 else 2))
    choices = LayerChoices(
        options=options, runs=runs, cuts=draw(_cuts(count)), pins=draw(_pins(count, ranks))
    )
    return choices, draw(_limits(ranks, per_rank, devices=devices, layers=count))


_SECONDS = st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, 3.0]) | st.floats(0.01, 4.0)


@st.composite
def _options(draw: st.DrawFn, position: int) -> LayerOption:
    return LayerOption(
        name=f"option {position}",
        seconds=draw(_SECONDS),
        step_seconds=draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])),
        fixed_bytes=draw(st.integers(0, 8)),
        saved_bytes=draw(st.integers(0, 8)),
        deferred_bytes=draw(st.integers(0, 3)),
        transient_bytes=draw(st.integers(0, 8)),
    )


@st.composite
def _cuts(draw: st.DrawFn, layers: int) -> tuple[Cut, ...]:
    if draw(st.booleans()):
        return ()
    return tuple(
        Cut(
            beginning_seconds=draw(st.sampled_from([0.0, 0.25, 1.0])),
            ending_seconds=draw(st.sampled_from([0.0, 0.25, 1.0])),
            is_allowed=draw(st.sampled_from([True, True, True, False])),
        )
        for _ in range(layers - 1)
    )


@st.composite
def _pins(draw: st.DrawFn, layers: int, stages: int) -> tuple[Pin, ...]:
    if draw(st.integers(0, 3)):
        return ()
    return (Pin(layer=draw(st.integers(0, layers - 1)), stage=draw(st.integers(0, stages - 1))),)


@st.composite
def _limits(
    draw: st.DrawFn, ranks: int, per_rank: int, *, devices: int, layers: int
) -> StageLimits:
    mean = 12 * per_rank * -(-layers // (ranks * per_rank))
    memory = [draw(st.integers(mean // 2, 3 * mean)) for _ in range(ranks)]
    is_v_shaped = per_rank == 2 and draw(st.booleans())
    shape = StageLimits(
        stages=(StageLimit(memory_bytes=0),) * (ranks * per_rank),
        microbatches=1,
        stages_per_rank=per_rank,
        is_v_shaped=is_v_shaped,
    )
    return StageLimits(
        stages=tuple(
            StageLimit(
                memory_bytes=memory[shape.rank_of(p)],
                in_flight=draw(st.integers(1, 3)),
                deferred=draw(st.sampled_from([0, 0, 1])),
                device_class=draw(st.integers(0, devices - 1)),
                cut_scale=draw(st.sampled_from([1.0, 1.0, 3.0])),
            )
            for p in range(ranks * per_rank)
        ),
        microbatches=draw(st.integers(1, 6)),
        stages_per_rank=per_rank,
        is_v_shaped=is_v_shaped,
    )
