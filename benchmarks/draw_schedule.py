"""Draws a pipeline schedule as text: one line per rank, time from left to right.

    python benchmarks/draw_schedule.py interleaved-zero-bubble --ranks 4 --microbatches 8

A digit is a forward (the last digit of its microbatch), a letter a backward, a comma a weight
gradient, a blank is idle time. All stages are equal; a rank's forward takes one unit of time, its
backward two.
"""

import argparse

from autopar.planner.costs.schedules.orders import Action, ActionKind, PipelineShape
from autopar.planner.costs.schedules.pipeline import order_of
from autopar.planner.costs.schedules.simulation import StageSeconds, simulate
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, in_flight, schedule_of


def mark(action: Action) -> str:
    """Return the character that stands for an action."""
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return ","
    first = "0" if action.kind is ActionKind.FORWARD else "a"
    return chr(ord(first) + action.microbatch % 10)


def drawn(kind: ScheduleKind, shape: PipelineShape, *, columns_per_forward: int) -> str:
    """Return the picture and one line that sums it up."""
    schedule, order = schedule_of(kind, shape), order_of(kind, shape)
    each = 1 / shape.stages_per_rank
    stage = StageSeconds(
        forward_seconds=each,
        backward_seconds=2 * each,
        input_gradient_seconds=each,
        weight_gradient_seconds=each,
    )
    result = simulate(
        order,
        [stage] * shape.stages,
        transfer_seconds=[0.0] * (shape.stages - 1),
        transfer=SCHEDULES[kind].transfer,
    )
    columns_per_second = columns_per_forward * shape.stages_per_rank
    lines = []
    for actions, starts, ends in zip(
        schedule, result.starts_seconds, result.ends_seconds, strict=True
    ):
        line = [" "] * round(result.step_seconds * columns_per_second)
        for action, start, end in zip(actions, starts, ends, strict=True):
            begin, stop = round(start * columns_per_second), round(end * columns_per_second)
            line[begin:stop] = mark(action) * (stop - begin)
        lines.append("".join(line).rstrip())
    idle = sum(result.idle_seconds) / (result.step_seconds * shape.ranks)
    held = list(in_flight(kind, shape))
    summary = f"step {result.step_seconds:g}, idle {idle:.1%}, in flight per stage {held}"
    return "\n".join([*lines, summary])


def main() -> None:
    """Read the shape from the command line and print the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", type=ScheduleKind, choices=list(ScheduleKind))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--columns-per-forward", type=int, default=1)
    given = parser.parse_args()
    shape = PipelineShape(
        ranks=given.ranks,
        stages_per_rank=given.stages_per_rank,
        microbatches=given.microbatches,
    )
    print(drawn(given.kind, shape, columns_per_forward=given.columns_per_forward))


if __name__ == "__main__":
    main()
