"""Checks a pipeline schedule without running it: completeness, order and freedom from deadlock."""

from collections import Counter
from collections.abc import Iterator

from autopar.planner.costs.schedules.orders import Action, ActionKind, Schedule
from autopar.planner.errors import gathered

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_SHOWN_FAULTS = 10  # a schedule of thousands of actions can have as many faults


def require_valid(schedule: Schedule, *, stages: int, microbatches: int) -> None:
    """Raise an InputError that tells every fault, if the schedule has any."""
    faults = schedule_faults(schedule, stages=stages, microbatches=microbatches)
    if faults:
        more = len(faults) - _SHOWN_FAULTS
        shown = faults[:_SHOWN_FAULTS] + ((f"and {more} more",) if more > 0 else ())
        raise gathered(shown, where=f"a schedule of {len(schedule)} ranks and {stages} stages")


def schedule_faults(schedule: Schedule, *, stages: int, microbatches: int) -> tuple[str, ...]:
    """Return what is wrong with a schedule, empty when it can run and computes everything once.

    Only a complete schedule is tried for deadlock, since a missing action blocks all that need it.
    """
    incomplete = (
        *_misplaced_stages(schedule, stages),
        *_wrong_counts(schedule, stages, microbatches),
    )
    return incomplete or tuple(_blocked_ranks(schedule, stages))


def dependencies(action: Action, *, stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return what must have run before an action: of each inner tuple one.

    A gradient comes from the next stage, by a full backward or by an input gradient.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is _F:
        return ((Action(stage - 1, _F, microbatch),),) if stage else ()
    if action.kind is _W:
        return ((Action(stage, _I, microbatch),),)
    own_forward = (Action(stage, _F, microbatch),)
    if stage == stages - 1:
        return (own_forward,)
    return (own_forward, (Action(stage + 1, _B, microbatch), Action(stage + 1, _I, microbatch)))


def _misplaced_stages(schedule: Schedule, stages: int) -> Iterator[str]:
    ranks_of_stage: dict[int, set[int]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            ranks_of_stage.setdefault(action.stage, set()).add(rank)
    for stage, ranks in sorted(ranks_of_stage.items()):
        if not 0 <= stage < stages:
            yield f"stage {stage} is not one of the {stages} stages"
        if len(ranks) > 1:
            yield f"stage {stage} runs on ranks {', '.join(map(str, sorted(ranks)))}"


def _wrong_counts(schedule: Schedule, stages: int, microbatches: int) -> Iterator[str]:
    """Yield each (stage, microbatch) that has not one forward and one B, or one I with one W."""
    counts = Counter(action for actions in schedule for action in actions)
    for action in counts:
        if not 0 <= action.microbatch < microbatches:
            yield f"{action} is not of one of the {microbatches} microbatches"
    for stage in range(stages):
        for mb in range(microbatches):
            found = {kind: counts[Action(stage, kind, mb)] for kind in ActionKind}
            whole = found[_B] == 1 and found[_I] == found[_W] == 0
            split = found[_B] == 0 and found[_I] == found[_W] == 1
            if found[_F] != 1 or not (whole or split):
                text = ", ".join(f"{count} {kind}" for kind, count in found.items())
                yield f"stage {stage} computes microbatch {mb} as {text}; 1 F, 1 B or 1 I and 1 W"


def _blocked_ranks(schedule: Schedule, stages: int) -> Iterator[str]:
    """Yield each rank that can never go on, by running every rank as far as it gets."""
    done: set[Action] = set()
    position = [0] * len(schedule)
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions) and _can_run(actions[position[rank]], done, stages):
                done.add(actions[position[rank]])
                position[rank] += 1
                progressed = True
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            yield f"rank {rank} waits for ever at {actions[position[rank]]}"


def _can_run(action: Action, done: set[Action], stages: int) -> bool:
    needed = dependencies(action, stages=stages)
    return all(any(one in done for one in alternatives) for alternatives in needed)
