"""Turns a loss into one whose fp16 gradients neither vanish nor overflow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.held_gradients import held_gradients
from autopar.runtime.mesh import Mesh


class LossScale:
    """A factor on the loss that halves after an overflow on any rank and doubles after a calm time.

    In a step: backward of `loss * scale.value`; then `fits = scale.unscale(parts)`; then clip
    and step the optimizer if it fits; then `scale.update(fits)`.
    """

    def __init__(
        self, mesh: Mesh, *, initial: float = 2.0**16, steps_until_growth: int = 2000
    ) -> None:
        self._mesh = mesh
        self._steps_until_growth = steps_until_growth
        self._calm_steps = 0
        self.value = initial

    def unscale(self, model_parts: Iterable[nn.Module]) -> bool:
        """Divide the gradients by the factor and say whether those of all ranks are finite."""
        overflow = torch.zeros(1, device=self._mesh.device)
        inverse = torch.full((1,), 1.0 / self.value, device=self._mesh.device)
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for one in held_gradients(model_parts):
            by_dtype[one.held.dtype].append(one.held)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        if self._mesh.world.size > 1:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._mesh.world.group)
        return self._mesh.is_dry_run or not bool(overflow)  # a dry run has no values to look at

    def update(self, fits: bool) -> None:
        """Adapt the factor to whether the last step's gradients were finite."""
        if not fits:
            self.value /= 2.0
            self._calm_steps = 0
            return
        self._calm_steps += 1
        if self._calm_steps == self._steps_until_growth:
            self.value *= 2.0
            self._calm_steps = 0
