"""Clipping, and the step of what a rank holds.

Scripts import from here; files import from each other.
"""

from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm, sum_replicated
from autopar.runtime.optimizer.loss_scaling import LossScale

__all__ = ["LossScale", "build_optimizer", "clip_by_global_norm", "sum_replicated"]
