"""When each rank of a plan's pipeline runs which action, as predicted and as measured."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError

from autopar.planner.costs.prediction import StagePrediction
from autopar.planner.costs.schedules.orders import ActionKind, Schedule
from autopar.planner.costs.schedules.pipeline import order_of, pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds, Times, simulate
from autopar.planner.costs.schedules.table import SCHEDULES, schedule_of, with_enough_rounds
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.errors import InputError
from autopar.planner.files import Number, Seconds, damaged, read_given, validation_messages
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
    rest_seconds: float  # of a step outside of its pipeline: gathers, reductions, optimizer, …


def timeline_of(plan: StoredPlan) -> Timeline:
    """Simulate one step of a plan."""
    kind, whole = plan.arrangement.schedule, pipeline_shape(plan.arrangement)
    shape, stages = with_enough_rounds(kind, whole), _stage_seconds(plan)
    transfers = _transfer_seconds(plan)
    found = simulate(
        order_of(kind, shape),
        stages,
        transfer_seconds=transfers,
        transfer=SCHEDULES[kind].transfer,
    )
    return Timeline(
        actions=tuple(_timed(schedule_of(kind, shape), found.starts_seconds, found.ends_seconds)),
        microbatches=shape.microbatches,
        is_whole=shape == whole,
        pipeline_seconds=found.step_seconds,
        rest_seconds=_rest_seconds(plan),
    )


def slowed_step_seconds(plan: StoredPlan, factors: Sequence[float]) -> float:
    """Return the seconds of a step whose ranks compute `factors` times as long as predicted.

    Messages take as long as predicted. Optimizer and host take the factor of the slowest rank.
    """
    stages = [
        _scaled(seconds, 1 + (factors[stage.rank] - 1) * _computed_share(predicted))
        for stage, predicted, seconds in zip(
            plan.stages, plan.prediction.stages, _stage_seconds(plan), strict=True
        )
    ]
    on_device = _term_seconds(plan, "optimizer") + _term_seconds(plan, "host overhead")
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
    """Return the share of a stage's time that is not spent on messages of the tensor axis."""
    whole = stage.forward_seconds + stage.backward_seconds
    return 1 - stage.tensor_seconds / whole if whole else 1.0


def _scaled(seconds: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(*(factor * one for one in seconds))


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
    return tuple(StageSeconds(*one) for one in found if one is not None)


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
class MemoryRecord:
    """The memory of a rank from this time on, until the time of its next record."""

    rank: int
    seconds: float
    bytes: int


def memory_over_step(plan: StoredPlan, timeline: Timeline) -> Iterator[MemoryRecord]:
    """Yield how the memory of each rank grows and shrinks, from its forwards and backwards.

    A rank always holds everything but activations. Of its predicted activations it holds a share:
    the microbatches that it holds now ÷ the most that it holds at once, over all its stages.
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
        yield MemoryRecord(rank=rank, seconds=0.0, bytes=least)
        for seconds, count in counts:
            size = least + memory.activation_bytes * count // most
            yield MemoryRecord(rank=rank, seconds=seconds, bytes=size)
        yield MemoryRecord(rank=rank, seconds=timeline.pipeline_seconds, bytes=least)


def backward_of(plan: StoredPlan) -> ActionKind:
    """Return the kind of backward that the stage before waits for."""
    splits = SCHEDULES[plan.arrangement.schedule].splits_backward
    return ActionKind.INPUT_GRADIENT if splits else ActionKind.BACKWARD


def numbers_of_stages(plan: StoredPlan, rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, in their order in the model."""
    return tuple(number for number, stage in enumerate(plan.stages) if stage.rank == rank)


def trace_events(
    actions: Sequence[TimedAction], *, name: str, place: int = 0
) -> Iterator[dict[str, object]]:
    """Yield actions as events of Chrome's trace format, which Perfetto opens.

    They are one process called `name`, with a thread for each pipeline rank. The events of a thread
    do not overlap.
    """
    yield {"ph": "M", "name": "process_name", "pid": place, "args": {"name": name}}
    for rank in sorted({one.rank for one in actions}):
        named = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": place, "tid": rank, "args": named}
    for one in actions:
        start = round(one.start_seconds * 1e9)
        yield {
            "ph": "X",
            "name": f"{ACTION_WORDS[one.kind]} {one.microbatch}",
            "cat": ACTION_WORDS[one.kind],
            "pid": place,
            "tid": one.rank,
            "ts": start / 1e3,  # microseconds
            "dur": (round(one.end_seconds * 1e9) - start) / 1e3,
            "args": {"stage": one.stage, "microbatch": one.microbatch},
        }


class _ActionRecord(BaseModel):
    part: Number
    kind: Literal["F", "B"]
    microbatch: Number
    start_seconds: Seconds
    end_seconds: Seconds


class _ProfileRecord(BaseModel):
    """A rank's record of the step of --profile-step; the profiler's trace is a file beside it."""

    pipeline_rank: Number
    begun_ns: Annotated[int, Ge(0), Le(2**63)]
    actions: list[_ActionRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The measured actions of the pipeline ranks in a step, and their kernels as trace events."""

    step: int
    actions: tuple[TimedAction, ...]
    kernels: tuple[dict[str, object], ...]


def measured_step(plan: StoredPlan, folder: Path) -> MeasuredStep:
    """Return the last step in a folder of profiles, which has a folder for each step."""
    steps = [one for one in folder.glob("*") if re.fullmatch(r"\d{1,15}", one.name, re.ASCII)]
    last = max(steps, key=lambda one: int(one.name), default=None)
    files = [] if last is None else sorted(last.glob("rank-*[0-9].json"))
    if last is None or not files:
        raise InputError(
            f"there is no profile in {folder}",
            expected="what a script writes with --profile-step 20 --metrics FILE",
        )
    actions: list[TimedAction] = []
    kernels: list[dict[str, object]] = []
    for path in files:
        try:
            found = _ProfileRecord.model_validate_json(read_given(path, what="the profile"))
        except ValidationError as error:
            fix = "profile a step again"
            raise damaged(
                validation_messages(error), what="the profile was", where=str(path), fix=fix
            ) from None
        actions += _measured(plan, found, path)
        kernels += _kernels(path.with_suffix(".trace.json.gz"), found)
    return MeasuredStep(step=int(last.name), actions=tuple(actions), kernels=tuple(kernels))


def _measured(plan: StoredPlan, found: _ProfileRecord, path: Path) -> Iterator[TimedAction]:
    numbers = numbers_of_stages(plan, found.pipeline_rank)
    kinds = {"F": ActionKind.FORWARD, "B": backward_of(plan)}
    for one in sorted(found.actions, key=lambda one: one.start_seconds):
        if one.part >= len(numbers):
            raise InputError("the profile is of another plan", where=str(path))
        yield TimedAction(
            rank=found.pipeline_rank,
            stage=numbers[one.part],
            kind=kinds[one.kind],
            microbatch=one.microbatch,
            start_seconds=one.start_seconds,
            end_seconds=one.end_seconds,
        )


_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")  # categories of torch's profiler
_MOST_TRACE_BYTES = 2**30
_FIRST_PLACE = 2  # the processes before are the plan's actions and the measured ones


def _kernels(path: Path, found: _ProfileRecord) -> Iterator[dict[str, object]]:
    """Yield the kernels of the profiler's trace, counted from the beginning of the step."""
    if not path.is_file():
        return
    try:
        with gzip.open(path) as file:
            trace = json.loads(file.read(_MOST_TRACE_BYTES))
        begun = (found.begun_ns - int(trace["baseTimeNanoseconds"])) / 1e3
        events = [one for one in trace["traceEvents"] if one.get("cat") in _KERNELS]
        spans = [(str(one["name"]), one["tid"], one["ts"] - begun, one["dur"]) for one in events]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"the profiler's trace cannot be read: {error}"[:200],
            where=str(path),
            fix="remove it, and the actions are shown without kernels",
        ) from None
    place = _FIRST_PLACE + found.pipeline_rank
    named = {"name": f"rank {found.pipeline_rank}, kernels"}
    yield {"ph": "M", "name": "process_name", "pid": place, "args": named}
    threads = {tid: number for number, tid in enumerate(dict.fromkeys(tid for _, tid, *_ in spans))}
    for name, tid, start, duration in spans:
        if start >= 0:
            yield {
                "ph": "X",
                "name": name,
                "pid": place,
                "tid": threads[tid],
                "ts": round(start, 3),
                "dur": duration,
            }
