"""Turns a seed into the random numbers that a constructor draws: the n-th draw is seeded by n.

A draw that is seeded by its number can be made alone, so no process makes the whole model. What a
constructor seeds itself stays as it seeds it: its draws then follow each other as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import init

from autopar.runtime.ranks.randomness import mixed_seed

REJECTING = "_no_grad_trunc_normal_"  # draws until all numbers fit: how often depends on them


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a generator stood before an op drew from it."""

    seed: int | None  # of a draw that is seeded by its number
    state: Tensor | None  # of one that follows what the constructor has set

    def set(self, generator: torch.Generator) -> None:
        """Have a generator go on from there."""
        if self.seed is not None:
            generator.manual_seed(self.seed)
        elif self.state is not None:
            generator.set_state(self.state)


class Draws:
    """The draws of one constructor, in their order.

    Before a draw that has a number, torch's default generator is seeded by that number. So a state
    that the constructor reads and sets back means the same number again, and a generator in any
    other state was set by the constructor.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[int, int] = {}  # by the seeds that they give
        self._is_inside = False  # of a draw that is made of several ops

    def begin(self, number: int = 0) -> None:
        """Seed the default generator for the draw of a number."""
        seed = mixed_seed(self._seed, number)
        self._numbers[seed] = number
        torch.default_generator.manual_seed(seed)

    @contextmanager
    def one(self, generator: torch.Generator | None) -> Iterator[Draw]:
        """Make one draw in the body, from the default generator unless another is given."""
        number = None if self._is_inside else self._number(generator)
        if number is None:
            yield Draw(None, (generator or torch.default_generator).get_state())
            return
        self._is_inside = True
        try:
            yield Draw(torch.default_generator.initial_seed(), None)
        finally:
            self._is_inside = False
        self.begin(number + 1)

    def _number(self, generator: Any) -> int | None:
        """Return the number of the next draw, None where the constructor has set the state."""
        default: Any = torch.default_generator
        if generator is not None and generator._cdata != default._cdata:
            return None
        seed = default.initial_seed()
        if seed not in self._numbers:
            return None
        fresh = torch.Generator().manual_seed(seed)
        is_fresh = torch.equal(fresh.get_state(), default.get_state())
        return self._numbers[seed] if is_fresh else None


def is_random(func: Callable[..., Any]) -> bool:
    """Tell ops that draw numbers; attention is marked so in torch, and draws by other ops."""
    if not isinstance(func, OpOverload):
        return True
    name = func.__name__
    drawing = torch.Tag.nondeterministic_seeded in func.tags
    return drawing and "attention" not in name and "sdp_choice" not in name


@contextmanager
def rejecting_by(draw: Callable[..., Tensor]) -> Iterator[None]:
    """Have `draw(original, tensor, *args, generator=…)` do what torch's trunc_normal_ does."""
    original = getattr(init, REJECTING, None)
    if original is None:  # older versions draw once, without a loop
        yield
        return

    def rejecting(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        return draw(original, tensor, *args, generator=generator)

    with patch.object(init, REJECTING, rejecting):
        yield
