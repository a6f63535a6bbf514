"""How few microbatches a dry run needs to tell what a step of many takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.codegen.proof.dryrun.running import extrapolated, microbatches_run
from autopar.planner.costs.schedules.table import ScheduleKind
from tests.planner.costs.step_factories import ARRANGEMENT

EACH = {"kind": "send", "ranks": 4, "bytes": 8}
ONCE = {"kind": "allreduce", "ranks": 2, "bytes": 64}


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages_per_rank", "run"),
    [
        (ScheduleKind.ONE_F_ONE_B, 1, 1, (1, 2)),
        (ScheduleKind.ONE_F_ONE_B, 4, 1, (4, 5)),
        # Rank 0 of 4 has 2 · 3 + 4 + 1 forwards of its two stages before its first backward.
        (ScheduleKind.INTERLEAVED_1F1B, 4, 2, (8, 12)),
        (ScheduleKind.ZERO_BUBBLE_V, 4, 2, (8, 12)),
    ],
)
def test_a_step_of_many_is_run_with_as_few_as_fill_the_pipeline(
    schedule: ScheduleKind, ranks: int, stages_per_rank: int, run: tuple[int, ...]
) -> None:
    many = replace(
        ARRANGEMENT,
        pipeline=ranks,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        microbatches=64,
    )
    assert microbatches_run(many) == run
    assert microbatches_run(replace(many, microbatches=run[-1])) == (run[-1],)


def test_each_further_microbatch_sends_what_the_last_one_did() -> None:
    runs = [
        ({**EACH, "count": 4}, {**ONCE, "count": 3}),
        ({**EACH, "count": 6}, {**ONCE, "count": 3}),
    ]
    found = extrapolated(runs, (2, 3), 10)
    assert found == ({**EACH, "count": 20}, {**ONCE, "count": 3})
