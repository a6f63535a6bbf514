"""Collects Python's garbage after the same steps on all ranks.

Python looks for cycles when so many objects have been made, on each rank at another time, and all
others wait for that rank. What is there before the first step is not looked through again.
"""

from __future__ import annotations

import gc
import weakref

from torch import Tensor

EVERY_STEPS = 100


class Garbage:
    """When garbage is collected: seldom, or after each step where cycles hold tensors."""

    def __init__(self) -> None:
        self._every, self._first_step = EVERY_STEPS, 0
        self._was_enabled = self._is_frozen = False

    def begin(self, step: int) -> None:
        """Leave it to `after` to collect."""
        self._first_step, self._was_enabled = step + 1, gc.isenabled()
        gc.collect()
        self._is_frozen = gc.get_freeze_count() == 0  # else someone else has frozen what is there
        if self._is_frozen:
            gc.freeze()
        gc.disable()

    def after(self, step: int) -> None:
        """Collect where it is time for that: a number of steps is the same on all ranks."""
        if step == self._first_step + 1 and _free_tensors():  # the first leaves what no other does
            self._every = 1  # of the model's own code: the memory of the device is worth more
        elif step % self._every == 0 or step == self._first_step:
            gc.collect(1)

    def end(self) -> None:
        """Leave it to Python again."""
        if self._was_enabled:
            gc.enable()
        if self._is_frozen:
            gc.unfreeze()
        self._was_enabled = self._is_frozen = False


def _free_tensors() -> bool:
    """Collect what is young, and return whether any tensors were freed by that."""
    young = [weakref.ref(one) for one in gc.get_objects(0) if isinstance(one, Tensor)]
    gc.collect(1)
    return any(one() is None for one in young)
