"""Tries a model's learning-rate schedule for a script's default number of steps."""

from __future__ import annotations

import warnings
from typing import Any

from autopar.planner.errors import InputError, text_of
from autopar.planner.findings.traits import ScheduleEnd
from autopar.planner.model.guard import user_location
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import outside_of

TRIED_STEPS = 100  # a script's default


def schedule_end(model_file: ModelFile, scheduler: Any) -> ScheduleEnd | None:
    """Step a schedule; return where it fails, or None. Raises if the first step fails."""
    before = outside_of(model_file.path).snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an optimizer that is not stepped
            for step in range(1, TRIED_STEPS + 1):
                try:
                    scheduler.step()
                except Exception as error:
                    return _ended(step, error, model_file)
    finally:
        before.put_back()
    return None


def _ended(step: int, error: Exception, model_file: ModelFile) -> ScheduleEnd:
    said = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]
    where = user_location(error, model_file.path)
    if step == 1:
        found = f"the first step of build_scheduler's schedule fails: {said}"
        raise InputError(found, where=where) from None
    return ScheduleEnd(step, said, where)
