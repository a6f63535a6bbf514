"""Turns the user's build_scheduler into a schedule that is known to last for all steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import kept_numbers
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.user_code import failing_at, place_of, said_of, told

SchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]

_NAME = "build_scheduler() of the model file"
_REHEARSING_SECONDS = 2.0  # at most: a schedule of a million steps takes longer


def build_scheduler(
    factory: SchedulerFactory, optimizer: Optimizer, *, steps: int, mesh: Mesh
) -> LRScheduler:
    """Build a schedule; leave where that fails, now or in one of so many steps.

    The first rank tries that on an optimizer that holds nothing.
    """
    with told(_NAME, factory):
        scheduler = factory(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        found = f"{_NAME} returns a {type(scheduler).__name__}, which has no step()"
        refuse(found, fix="return a schedule of steps, as those of torch.optim.lr_scheduler")
    if mesh.rank == 0 and not mesh.is_dry_run:
        with kept_numbers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer is not stepped
            _rehearse(factory, optimizer, steps)
    return scheduler


def _rehearse(factory: SchedulerFactory, optimizer: Optimizer, steps: int) -> None:
    scheduler: Any = None
    with suppress(Exception):  # a schedule may need more of an optimizer than its settings
        scheduler = factory(_settings_of(optimizer))
    if scheduler is None:
        return
    until = time.monotonic() + _REHEARSING_SECONDS
    for step in range(1, steps + 1):
        try:
            scheduler.step()
        except Exception as error:
            place = failing_at(error) or place_of(factory)
            refuse(
                f"the schedule of {_NAME} fails in step {step:,} of {steps:,}: {said_of(error)}",
                fix=f"let it last for all steps, or train fewer (--steps): look at {place}",
            )
        if time.monotonic() > until:
            return


def _settings_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the settings of another one, and parameters without numbers."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [nn.Parameter(torch.empty(0))]}
        for group in optimizer.param_groups
    ]
    return Optimizer(groups, dict(optimizer.defaults))
