"""When each rank of a plan's pipeline runs which action, and what its memory holds meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.costs.prediction import StagePrediction
from autopar.planner.costs.schedules.orders import ActionKind, Schedule
from autopar.planner.costs.schedules.pipeline import pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds, Times, simulate
from autopar.planner.costs.schedules.table import SCHEDULES, schedule_of, settled
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import StoredPlan

ACTION_WORDS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "backward, input gradients",
    ActionKind.WEIGHT_GRADIENT: "backward, weight gradients",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action of a rank; its times count from the start of the pipeline."""

    rank: int
    stage: int
    kind: ActionKind
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The actions of all pipeline ranks in one step, rank by rank.

    Long steps repeat a round of microbatches. Then the timeline has fewer microbatches than the
    step, and runs them as if there were no more.
    """

    actions: tuple[TimedAction, ...]
    microbatches: int
    is_whole: bool  # it has every microbatch of the step
    pipeline_seconds: float  # of these microbatches
    rest_seconds: float  # of a step after its pipeline: last reductions, optimizer, framework


def timeline_of(plan: StoredPlan) -> Timeline:
    """Simulate one step of a plan."""
    kind, whole = plan.arrangement.schedule, pipeline_shape(plan.arrangement)
    shape, stages = settled(kind, whole), _stage_seconds(plan)
    transfers = _transfer_seconds(plan)
    schedule = schedule_of(kind, shape)
    found = simulate(
        schedule, stages, transfer_seconds=transfers, transfer=SCHEDULES[kind].transfer
    )
    return Timeline(
        actions=tuple(_timed(schedule, found.starts_seconds, found.ends_seconds)),
        microbatches=shape.microbatches,
        is_whole=shape == whole,
        pipeline_seconds=found.step_seconds,
        rest_seconds=_rest_seconds(plan),
    )


def retold_step_seconds(plan: StoredPlan, factors: Sequence[float]) -> float:
    """Return the seconds of a step whose ranks compute `factors` times as long as predicted.

    Messages take as long as predicted. Optimizer and framework take the factor of the slowest rank.
    """
    stages = [
        _scaled(seconds, 1 + (factors[stage.rank] - 1) * _computed_share(predicted))
        for stage, predicted, seconds in zip(
            plan.stages, plan.prediction.stages, _stage_seconds(plan), strict=True
        )
    ]
    on_device = _term_seconds(plan, "optimizer") + _term_seconds(plan, "framework")
    rest = _rest_seconds(plan)
    rest += (max(factors) - 1) * min(rest, on_device)
    return _pipeline_seconds(plan, stages) + rest


def computing_seconds(plan: StoredPlan, rank: int) -> float:
    """Return the predicted compute time of a pipeline rank in a step."""
    of_layers = sum(
        one.forward_seconds + one.backward_seconds - one.tensor_seconds
        for one in stages_of_rank(plan, rank)
    )
    return plan.arrangement.microbatches * of_layers + _term_seconds(plan, "optimizer")


def stages_of_rank(plan: StoredPlan, rank: int) -> list[StagePrediction]:
    """Return the predictions for the stages of a pipeline rank."""
    stages = zip(plan.stages, plan.prediction.stages, strict=True)
    return [one for stage, one in stages if stage.rank == rank]


def _term_seconds(plan: StoredPlan, name: str) -> float:
    return sum(term.seconds for term in plan.prediction.terms if term.name == name)


def _computed_share(stage: StagePrediction) -> float:
    """Return the share of a stage's time that is no message of the tensor axis."""
    whole = stage.forward_seconds + stage.backward_seconds
    return 1 - stage.tensor_seconds / whole if whole else 1.0


def _scaled(seconds: StageSeconds, factor: float) -> StageSeconds:
    return _of_kinds([factor * one for one in seconds.of_kinds])


def _rest_seconds(plan: StoredPlan) -> float:
    """Return the seconds of a step that are not its pipeline's."""
    return max(0.0, plan.prediction.step_seconds - _pipeline_seconds(plan, _stage_seconds(plan)))


def _pipeline_seconds(plan: StoredPlan, stages: Sequence[StageSeconds]) -> float:
    shape = pipeline_shape(plan.arrangement)
    kind, transfers = plan.arrangement.schedule, _transfer_seconds(plan)
    return pipeline_seconds(kind, shape, stages, transfer_seconds=transfers).step_seconds


def _transfer_seconds(plan: StoredPlan) -> list[float]:
    return [one.transfer_seconds for one in plan.prediction.stages[:-1]]


def _stage_seconds(plan: StoredPlan) -> tuple[StageSeconds, ...]:
    found = [one.action_seconds for one in plan.prediction.stages]
    if None in found:
        raise InputError(
            "this plan does not say how long the actions of its stages take",
            expected="a plan of this version of autopar",
            fix="plan again",
        )
    return tuple(_of_kinds(one) for one in found if one is not None)


def _of_kinds(seconds: Sequence[float]) -> StageSeconds:
    forward, backward, inputs, weights = seconds
    return StageSeconds(
        forward_seconds=forward,
        backward_seconds=backward,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
    )


def _timed(schedule: Schedule, starts: Times, ends: Times) -> Iterator[TimedAction]:
    for rank, actions in enumerate(schedule):
        for action, start, end in zip(actions, starts[rank], ends[rank], strict=True):
            yield TimedAction(
                rank=rank,
                stage=action.stage,
                kind=action.kind,
                microbatch=action.microbatch,
                start_seconds=start,
                end_seconds=end,
            )


_FREES = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What a rank holds from one moment to the next one."""

    rank: int
    seconds: float
    bytes: int


def memory_over_step(plan: StoredPlan, timeline: Timeline) -> Iterator[HeldBytes]:
    """Yield how the memory of each rank grows and shrinks, from its forwards and backwards.

    Between its least and its predicted peak, a rank's activations are proportional to the number of
    microbatches that it holds, of all its stages together.
    """
    for rank in range(plan.arrangement.pipeline):
        own = [one for one in timeline.actions if one.rank == rank]
        changes = [(one.start_seconds, 1) for one in own if one.kind is ActionKind.FORWARD]
        changes += [(one.end_seconds, -1) for one in own if one.kind in _FREES]
        held, counts = 0, []
        for seconds, change in sorted(changes):
            held += change
            counts.append((seconds, held))
        memory = next(
            predicted.memory
            for stage, predicted in zip(plan.stages, plan.prediction.stages, strict=True)
            if stage.rank == rank
        )
        most = max(count for _, count in counts)
        least = memory.device_bytes - memory.activation_bytes
        yield HeldBytes(rank=rank, seconds=0.0, bytes=least)
        for seconds, count in counts:
            size = least + memory.activation_bytes * count // most
            yield HeldBytes(rank=rank, seconds=seconds, bytes=size)
        yield HeldBytes(rank=rank, seconds=timeline.pipeline_seconds, bytes=least)


def trace_events(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Yield a timeline as events of Chrome's trace format, which Perfetto opens.

    Each pipeline rank is a thread; its events do not overlap.
    """
    for rank in range(timeline.actions[-1].rank + 1):
        named = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": named}
    for one in timeline.actions:
        start = round(one.start_seconds * 1e9)
        yield {
            "ph": "X",
            "name": f"{ACTION_WORDS[one.kind]} {one.microbatch}",
            "cat": ACTION_WORDS[one.kind],
            "pid": 0,
            "tid": one.rank,
            "ts": start / 1e3,  # microseconds
            "dur": (round(one.end_seconds * 1e9) - start) / 1e3,
            "args": {"stage": one.stage, "microbatch": one.microbatch},
        }
