"""Clipping, and the step of what a rank holds.

Scripts import from here; files import from each other.
"""

from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm, sum_replicated
from autopar.runtime.optimizer.loss_scaling import LossScale
from autopar.runtime.optimizer.schedule import build_scheduler
from autopar.runtime.optimizer.usual import adamw, warmup_cosine

__all__ = [
    "LossScale",
    "adamw",
    "build_optimizer",
    "build_scheduler",
    "clip_by_global_norm",
    "sum_replicated",
    "warmup_cosine",
]
