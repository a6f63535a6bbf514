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
    """Where a generator stood before an op drew from it: one of these is known."""

    seed: int | None = None  # of a draw that has a number
    state: Tensor | None = None
    behind: int | None = None  # the recorded op that drew before


class Draws:
    """The draws of one constructor, in their order.

    Before a draw that has a number, torch's default generator is seeded by that number. So a state
    that the constructor reads and sets back means the same number again, and a generator in any
    other state was set by the constructor.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[int, int] = {}  # by the seeds that they give
        self._behind: dict[int, Draw] = {}  # by seeds that stand for states which nobody has made
        self._is_inside = False  # of a draw that is made of several ops

    def begin(self, number: int = 0) -> None:
        """Seed the default generator for the draw of a number."""
        seed = mixed_seed(self._seed, number)
        self._numbers[seed] = number
        torch.default_generator.manual_seed(seed)

    @contextmanager
    def one(self, generator: torch.Generator | None) -> Iterator[None]:
        """Make one draw in the body, from the default generator unless another is given."""
        number = self._numbers.get(_fresh_seed()) if is_default(generator) else None
        if number is None or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        self.begin(number + 1)

    def noted(self, op: int) -> Draw:
        """Note what a recorded op draws from the default generator, without drawing it.

        A generator that the constructor has set gets a state that stands for the one after the op.
        """
        seed = _fresh_seed()
        if seed in self._numbers:
            self.begin(self._numbers[seed] + 1)
            return Draw(seed=seed)
        draw = self._behind.get(seed) or Draw(state=torch.default_generator.get_state())
        follows = mixed_seed(self._seed, -1 - op)
        self._behind[follows] = Draw(behind=op)
        torch.default_generator.manual_seed(follows)
        return draw

    def behind(self) -> int | None:
        """Return the op whose draw was noted last, where the generator stands for its state."""
        draw = self._behind.get(_fresh_seed())
        return None if draw is None else draw.behind


def is_default(generator: Any) -> bool:
    """Whether an op draws from torch's default generator."""
    default: Any = torch.default_generator
    return generator is None or generator._cdata == default._cdata


def _fresh_seed() -> int:
    """Return the seed of the default generator, -1 where numbers were drawn since."""
    default = torch.default_generator
    seed = default.initial_seed()
    fresh = torch.Generator().manual_seed(seed)
    return seed if torch.equal(fresh.get_state(), default.get_state()) else -1


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
