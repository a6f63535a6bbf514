"""Runs pipeline stages under torch's schedules.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.pipeline.schedules import (
    Pipeline,
    build_schedule,
    stage_at,
    stage_indices,
)
from autopar.runtime.pipeline.stage import Stage, Tie

__all__ = ["Pipeline", "Stage", "Tie", "build_schedule", "stage_at", "stage_indices"]
