"""The words of a pipeline schedule: actions that print as `2F0` and parse back."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.errors import InputError


class ActionKind(StrEnum):
    """What a stage computes for one microbatch, in the letters of torch.distributed.pipelining."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights in one go
    INPUT_GRADIENT = "I"  # the half of the backward that the previous stage waits for
    WEIGHT_GRADIENT = "W"  # the half that nobody waits for


class Action(NamedTuple):
    """One stage computes one thing for one microbatch; reads in the order in which it prints."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# For each rank the actions in the order in which it runs them.
Schedule = tuple[tuple[Action, ...], ...]
Numbers = npt.NDArray[np.int64]

_ACTION_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def parse_action(text: str) -> Action:
    """Return the action that prints as this text."""
    match = _ACTION_TEXT.fullmatch(text)
    if match is None:
        raise InputError(
            f"{text!r} is not an action of a pipeline schedule",
            expected="an action is stage, one of F B I W, microbatch: 2F0",
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), ActionKind(kind), int(microbatch))


def format_schedule(schedule: Schedule) -> str:
    """Return one line per rank, its actions separated by blanks."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that `format_schedule` prints as this text."""
    return tuple(tuple(map(parse_action, line.split())) for line in text.splitlines())


def columns_of(actions: Sequence[Action]) -> tuple[Numbers, Numbers, Numbers]:
    """Return the stage, the place of the kind in ActionKind and the microbatch of each action."""
    stages, kinds, microbatches = zip(*actions, strict=True)
    places = {kind: place for place, kind in enumerate(ActionKind)}
    return np.array(stages), np.array([places[kind] for kind in kinds]), np.array(microbatches)
