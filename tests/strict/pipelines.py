"""Logs of pipelines: what torch's schedules send, and what is computed in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar.codegen.proof.dryrun.watching import report_of
from autopar.planner.costs.schedules.orders import ActionKind, PipelineShape
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.runtime.pipeline.schedules import Pipeline, build_schedule, stage_indices
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.ranks.mesh import start
from tests.strict.alone import logs_alone
from tests.strict.log import Event, Log
from tests.strict.replay import Durations

WIDTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a stage computes for one microbatch."""

    stage: int
    kind: ActionKind


def durations(stages: Sequence[StageSeconds], transfer_seconds: float) -> Durations:
    """Return how long actions of these stages take, and a message."""

    def of_work(work: Hashable) -> float:
        assert isinstance(work, Action)
        return dict(zip(ActionKind, stages[work.stage], strict=True))[work.kind]

    return Durations(of_work=of_work, of_operation=lambda _: transfer_seconds)


def small_logs(kind: ScheduleKind, shape: PipelineShape) -> list[list[Event]]:
    """Return the logs of a step of a pipeline of small layers."""
    return logs_alone(_run_small, shape.ranks, kind, shape)


def evaluation_logs(kind: ScheduleKind, shape: PipelineShape) -> list[list[Event]]:
    """Return the logs of an evaluation by a pipeline of small layers."""
    return logs_alone(_evaluate_small, shape.ranks, kind, shape)


def script_logs(path: Path, ranks: int) -> list[list[Event]]:
    """Return the logs of the pipeline in a step of a script."""
    return logs_alone(_run_script, ranks, path)


class SmallStage(nn.Module):
    """A layer, and the loss on the last stage."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.layer, self.is_last = nn.Linear(WIDTH, WIDTH), is_last

    def forward(self, *received: Tensor, x: Tensor) -> Tensor:
        (given,) = received or (x,)
        made: Tensor = self.layer(given)
        return made.sum() if self.is_last else made


def _run_small(log: Log, kind: ScheduleKind, shape: PipelineShape) -> None:
    pipeline = _small_pipeline(kind, shape)
    with _step_alone(log):
        pipeline.step(_rows(shape), [1.0] * shape.microbatches)


def _evaluate_small(log: Log, kind: ScheduleKind, shape: PipelineShape) -> None:
    pipeline = _small_pipeline(kind, shape)
    log.events.clear()
    with torch.no_grad(), patch.object(Stage, "evaluate", _noting(Stage.evaluate, log)):
        assert len(list(pipeline.losses_of(_rows(shape)))) == shape.microbatches


def _rows(shape: PipelineShape) -> list[dict[str, Tensor]]:
    return [{"x": torch.zeros(1, WIDTH)}] * shape.microbatches


def _small_pipeline(kind: ScheduleKind, shape: PipelineShape) -> Pipeline:
    mesh = start(pipeline=shape.ranks, data=1, tensor=1)
    crossing = (torch.empty(1, WIDTH, device="meta", requires_grad=True),)
    stages = [
        Stage(
            SmallStage(is_last=index == shape.stages - 1),
            mesh,
            index=index,
            stages=shape.stages,
            receives=crossing if index else (),
            sends=crossing if index < shape.stages - 1 else (),
        )
        for index in stage_indices(kind, mesh.pipeline.rank, shape.ranks, shape.stages_per_rank)
    ]
    return build_schedule(kind, stages, shape.microbatches)


def _run_script(log: Log, path: Path) -> None:
    with _step_alone(log):
        report_of(path)


@contextmanager
def _step_alone(log: Log) -> Iterator[None]:
    """Leave in the log what a step of a pipeline sends and computes, and nothing else."""
    step = Pipeline.step

    def stepped(pipeline: Pipeline, *args: Any, **kwargs: Any) -> Tensor:
        log.events.clear()
        loss = step(pipeline, *args, **kwargs)
        found[:] = log.events
        return loss

    found: list[Event] = []
    with ExitStack() as stack:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            noted = _noting(getattr(Stage, name), log)
            stack.enter_context(patch.object(Stage, name, noted))
        stack.enter_context(patch.object(Pipeline, "step", stepped))
        yield
    log.events[:] = found


def _noting(run: Callable[..., Any], log: Log) -> Callable[..., Any]:
    def noted(stage: Stage, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        kind = _KINDS[run.__name__, full_backward]
        log.compute(Action(stage=stage.stage_index, kind=kind))
        if run.__name__ == "backward_one_chunk":
            kwargs["full_backward"] = full_backward
        return run(stage, *args, **kwargs)

    return noted


_KINDS = {
    ("evaluate", True): ActionKind.FORWARD,
    ("forward_one_chunk", True): ActionKind.FORWARD,
    ("backward_one_chunk", True): ActionKind.BACKWARD,
    ("backward_one_chunk", False): ActionKind.INPUT_GRADIENT,
    ("backward_weight_one_chunk", True): ActionKind.WEIGHT_GRADIENT,
}
