"""The words of a pipeline schedule: actions that print as `2F0`."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


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


def columns_of(actions: Sequence[Action]) -> tuple[Numbers, Numbers, Numbers]:
    """Return the stage, the place of the kind in ActionKind and the microbatch of each action."""
    stages, kinds, microbatches = zip(*actions, strict=True)
    places = {kind: place for place, kind in enumerate(ActionKind)}
    return np.array(stages), np.array([places[kind] for kind in kinds]), np.array(microbatches)
