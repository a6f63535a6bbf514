"""Turns a loss into one whose fp16 gradients neither vanish nor overflow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.optimizer.held_gradients import gradient_memory
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse

LEAST = 2.0**-10  # whoever overflows here has gradients of 10^7: it is not the scale


class LossScale:
    """A factor on the loss that halves after an overflow on any rank and doubles after a calm time.

    In a step: backward of `loss * scale.value`, then `scale.unscale(parts)`; clip and step the
    optimizer if that says that the gradients are finite.
    """

    def __init__(
        self, mesh: Mesh, *, initial: float = 2.0**15, steps_until_growth: int = 2000
    ) -> None:
        self.value = initial
        self.fits = True  # whether all gradients of the last step were finite
        self.calm_steps = 0  # since the factor changed
        self._mesh = mesh
        self._steps_until_growth = steps_until_growth

    def go_on(self, value: float, calm_steps: int) -> None:
        """Begin where another one was."""
        self.value, self.calm_steps = value, calm_steps

    def unscale(self, model_parts: Iterable[nn.Module]) -> bool:
        """Divide the gradients by the factor, and say whether those of all ranks are finite.

        The factor of the next step depends on it, and is the same on all ranks.
        """
        single: dict[str, Any] = {"device": self._mesh.device, "dtype": torch.float32}
        overflow, inverse = torch.zeros(1, **single), torch.full((1,), 1.0 / self.value, **single)
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradient_memory(model_parts):
            by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        if self._mesh.world.size > 1:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._mesh.world.group)
        self.fits = self._mesh.is_dry_run or not bool(overflow)  # a dry run has no values
        self._adapt()
        return self.fits

    def _adapt(self) -> None:
        if self.fits:
            self.calm_steps += 1
            if self.calm_steps == self._steps_until_growth:
                self.value *= 2.0
                self.calm_steps = 0
            return
        self.value /= 2.0
        self.calm_steps = 0
        if self.value < LEAST:
            refuse(
                f"gradients overflow with the loss times {2 * self.value:g} too: some activation "
                "is beyond what fp16 holds (65,504), or the training diverges",
                fix="train with --dtype float32, in bf16 (plan again), or with a lower --lr",
            )
