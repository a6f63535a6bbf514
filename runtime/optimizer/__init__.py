"""Clips gradients, steps the optimizer on a rank's shards, and averages replicas.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.optimizer.building import (
    adamw,
    build_optimizer,
    build_scheduler,
    warmup_cosine,
)
from autopar.runtime.optimizer.gradients import LossScale, clip_by_global_norm, sum_replicated
from autopar.runtime.optimizer.outer import OuterOptimizer

__all__ = [
    "LossScale",
    "OuterOptimizer",
    "adamw",
    "build_optimizer",
    "build_scheduler",
    "clip_by_global_norm",
    "sum_replicated",
    "warmup_cosine",
]
