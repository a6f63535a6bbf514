"""Schedules as text, one line per rank, and what each stage holds along their orders."""

import re

from autopar.planner.costs.schedules.orders import Action, ActionKind, PipelineShape, Schedule

_RELEASES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def shape_of(ranks: int, microbatches: int, stages_per_rank: int = 1) -> PipelineShape:
    """Return the shape of a pipeline."""
    return PipelineShape(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches)


def format_schedule(schedule: Schedule) -> str:
    """Return one line per rank, its actions separated by blanks."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that prints as this text."""
    return tuple(
        tuple(
            Action(int(stage), ActionKind(kind), int(microbatch))
            for stage, kind, microbatch in re.findall(r"(\d+)([FBIW])(\d+)", line)
        )
        for line in text.splitlines()
    )


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most microbatches in flight at once, counted along the order."""
    current: dict[int, int] = {}
    peak: dict[int, int] = {}
    for actions in schedule:
        for action in actions:
            stage = action.stage
            if action.kind is ActionKind.FORWARD:
                current[stage] = current.get(stage, 0) + 1
                peak[stage] = max(peak.get(stage, 0), current[stage])
            elif action.kind in _RELEASES:
                current[stage] -= 1
    return tuple(peak[stage] for stage in sorted(peak))


def peak_deferred(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most microbatches at once between the halves of their backward."""
    current: dict[int, int] = {}
    peak: dict[int, int] = {}
    for actions in schedule:
        for action in actions:
            stage = action.stage
            if action.kind is ActionKind.INPUT_GRADIENT:
                current[stage] = current.get(stage, 0) + 1
            elif action.kind is ActionKind.WEIGHT_GRADIENT:
                current[stage] -= 1
            peak[stage] = max(peak.get(stage, 0), current.get(stage, 0))
    return tuple(peak[stage] for stage in sorted(peak))
