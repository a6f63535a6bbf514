"""Chains of a schedule: exact for the stages that they were found with, and a bound for others."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.paths import Chain, first_chains, longest_chains, times_of
from autopar.planner.costs.schedules.pipeline import pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import ScheduleKind, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline with what is sent and reduced, its stages still open."""

    kind: ScheduleKind
    shape: PipelineShape
    transfers: tuple[float, ...]
    reductions: tuple[float, ...]

    def step_seconds(self, stages: list[StageSeconds]) -> float:
        found = pipeline_seconds(self.kind, self.shape, stages, transfer_seconds=self.transfers)
        ends = zip(found.rank_ends_seconds, self.reductions, strict=True)
        return max(found.step_seconds, *(end + more for end, more in ends))

    def chains(self, stages: list[StageSeconds]) -> tuple[Chain, ...]:
        found = longest_chains(
            self.kind,
            self.shape,
            stages,
            transfer_seconds=self.transfers,
            reduction_seconds=self.reductions,
        )
        return (*first_chains(self.kind, self.shape), *found)

    def length(self, chain: Chain, stages: list[StageSeconds]) -> float:
        reduced = 0.0 if chain.rank is None else self.reductions[chain.rank]
        return float((chain.counts * times_of(stages, self.transfers)).sum()) + reduced


def random_case(random: Random) -> Case:
    kind, ranks = random.choice(list(ScheduleKind)), random.choice((2, 3, 4))
    microbatches = ranks * random.choice((1, 2, 3, 4))
    shapes = (
        PipelineShape(ranks=ranks, stages_per_rank=several, microbatches=microbatches)
        for several in (1, 2, 3)
    )
    shape = random.choice([one for one in shapes if not refusal(kind, one)])
    return Case(
        kind=kind,
        shape=shape,
        transfers=tuple(random.uniform(0, 0.5) for _ in range(shape.stages - 1)),
        reductions=tuple(random.uniform(0, 3) for _ in range(ranks)),
    )


def random_stages(random: Random, count: int) -> list[StageSeconds]:
    stages = []
    for _ in range(count):
        backward = random.uniform(0.2, 4)
        inputs = backward * random.uniform(0.3, 1)
        stages.append(
            StageSeconds(
                forward_seconds=random.uniform(0.2, 2),
                backward_seconds=backward,
                input_gradient_seconds=inputs,
                weight_gradient_seconds=backward - inputs + random.uniform(0, 0.1),
            )
        )
    return stages


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_chain_is_the_step_and_bounds_all_others(seed: int) -> None:
    random = Random(seed)
    case = random_case(random)
    stages = random_stages(random, case.shape.stages)
    chains = case.chains(stages)
    longest = max(case.length(one, stages) for one in chains)
    assert longest == pytest.approx(case.step_seconds(stages), rel=1e-9)
    for _ in range(3):
        others = random_stages(random, case.shape.stages)
        most = max(case.length(one, others) for one in chains)
        assert most <= case.step_seconds(others) * (1 + 1e-9)
