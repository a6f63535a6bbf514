"""Steps of pipelines without simulating every microbatch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from autopar.planner.costs.schedules import pipeline
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.pipeline import pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, rank_of, schedule_of
from tests.planner.costs.schedules.equal_stages import simulate

FIGURES = (
    "forward_seconds",
    "backward_seconds",
    "input_gradient_seconds",
    "weight_gradient_seconds",
)


def uneven(stages: int, seed: int) -> tuple[StageSeconds, ...]:
    """Stages that differ by up to a fifth; halves of a backward take longer than the whole."""
    generator = random.Random(seed)
    times = [generator.uniform(0.8, 1.2) for _ in range(stages)]
    return tuple(
        StageSeconds(
            forward_seconds=t,
            backward_seconds=2 * t,
            input_gradient_seconds=1.1 * t,
            weight_gradient_seconds=1.4 * t,
        )
        for t in times
    )


@pytest.fixture
def rounds_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no schedule simulated whole that has more than a few rounds."""
    monkeypatch.setattr(pipeline, "_MOST_ACTIONS", 0)
    pipeline._simulated.cache_clear()
    yield
    pipeline._simulated.cache_clear()


def found_by_whole(
    kind: ScheduleKind, shape: PipelineShape, stages: tuple[StageSeconds, ...]
) -> float:
    """Return the seconds that are found, by those of a simulation of all microbatches."""
    transfers = (0.02,) * (shape.stages - 1)
    found = pipeline_seconds(kind, shape, stages, transfer_seconds=transfers)
    whole = simulate(
        schedule_of(kind, shape),
        stages,
        transfer_seconds=transfers,
        transfer=SCHEDULES[kind].transfer,
    )
    return found.step_seconds / whole.step_seconds


@pytest.mark.usefixtures("rounds_alone")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "ranks", "per_rank", "microbatches"),
    [
        (ScheduleKind.GPIPE, 4, 1, 32),
        (ScheduleKind.ONE_F_ONE_B, 4, 1, 32),
        (ScheduleKind.INTERLEAVED_1F1B, 4, 2, 64),
        (ScheduleKind.INTERLEAVED_1F1B, 4, 2, 8),
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 4, 2, 64),
        (ScheduleKind.ZERO_BUBBLE_V, 4, 2, 64),
    ],
)
def test_it_agrees_with_the_whole_simulation(
    kind: ScheduleKind, ranks: int, per_rank: int, microbatches: int, seed: int
) -> None:
    shape = PipelineShape(ranks=ranks, stages_per_rank=per_rank, microbatches=microbatches)
    stages = uneven(shape.stages, seed)
    assert found_by_whole(kind, shape, stages) == pytest.approx(1, rel=0.03)


@pytest.mark.usefixtures("rounds_alone")
@pytest.mark.parametrize("seed", [7, 24, 25])
@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [(ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 1), (ScheduleKind.ZERO_BUBBLE_V, 2)],
)
def test_the_slowest_rank_is_the_one_whose_halves_take_longest(
    kind: ScheduleKind, per_rank: int, seed: int
) -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=per_rank, microbatches=64)
    generator = random.Random(seed)
    stages = tuple(
        StageSeconds(**{name: generator.uniform(0.1, 2) for name in FIGURES})
        for _ in range(shape.stages)
    )
    assert found_by_whole(kind, shape, stages) == pytest.approx(1, rel=0.015)


def test_one_stage_runs_its_microbatches_one_after_the_other() -> None:
    shape = PipelineShape(ranks=1, stages_per_rank=1, microbatches=7)
    (stage,) = uneven(1, 0)
    found = pipeline_seconds(ScheduleKind.ONE_F_ONE_B, shape, (stage,), transfer_seconds=())
    assert found.step_seconds == pytest.approx(7 * 3 * stage.forward_seconds)


def test_later_ranks_end_first() -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    found = pipeline_seconds(
        ScheduleKind.ONE_F_ONE_B, shape, uneven(4, 0), transfer_seconds=(0.0,) * 3
    )
    assert found.rank_ends_seconds == tuple(sorted(found.rank_ends_seconds, reverse=True))
    assert found.rank_starts_seconds == tuple(sorted(found.rank_starts_seconds))


def test_a_v_comes_back_over_the_same_ranks() -> None:
    assert [rank_of(ScheduleKind.ZERO_BUBBLE_V, stage, 3) for stage in range(6)] == [
        0, 1, 2, 2, 1, 0,
    ]  # fmt: skip
    assert [rank_of(ScheduleKind.INTERLEAVED_1F1B, stage, 3) for stage in range(6)] == [
        0, 1, 2, 0, 1, 2,
    ]  # fmt: skip
