"""Builds the model in plain PyTorch on the CPU, with a separate seed for each random op.

A random op, or a truncated-normal initialisation, is called a draw. The seed of a constructor's
n-th draw depends on n only. Draws can therefore be repeated one by one, and no process makes the
whole model. If a constructor seeds a generator itself, the following draws depend on each other as
in plain PyTorch.

`plain_model` just runs the constructor, without recording it. Its weights are therefore an
independent reference for those that scripts start with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.ranks.randomness import mixed_seed, seeded

# torch's function for truncated normals. It draws again until all numbers are in range, so how
# often it draws depends on the numbers.
REJECTING = "_no_grad_trunc_normal_"


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a generator before an op drew from it: exactly one field is set."""

    seed: int | None = None  # the seed of a numbered draw
    state: Tensor | None = None
    behind: int | None = None  # the recorded op that this state follows


class Draws:
    """The draws of one constructor, in order.

    Before each numbered draw, torch's default generator is seeded by the number. If the constructor
    saves and restores this state, the same draw follows. A generator in any other state was seeded
    by the constructor.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[int, int] = {}  # draw numbers, by the seeds that they set
        # placeholder seed → the op whose final generator state the seed stands for
        self._placeholders: dict[int, GeneratorState] = {}
        self._is_inside = False  # whether a draw of several ops is running

    def begin(self, number: int = 0) -> None:
        """Seed the default generator for a draw."""
        seed = mixed_seed(self._seed, number)
        self._numbers[seed] = number
        torch.default_generator.manual_seed(seed)

    @contextmanager
    def one(self, generator: torch.Generator | None) -> Iterator[None]:
        """Count the code inside as one numbered draw.

        Inside another draw, or if the constructor seeded the generator, it is not counted.
        """
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

    def noted(self, op: int) -> GeneratorState:
        """Return the generator's state before an op draws; advance the generator without drawing.

        If the constructor has seeded the generator, it is advanced to a placeholder for its state
        after the op.
        """
        seed = _fresh_seed()
        if seed in self._numbers:
            self.begin(self._numbers[seed] + 1)
            return GeneratorState(seed=seed)
        draw = self._placeholders.get(seed) or GeneratorState(
            state=torch.default_generator.get_state()
        )
        follows = mixed_seed(self._seed, -1 - op)
        self._placeholders[follows] = GeneratorState(behind=op)
        torch.default_generator.manual_seed(follows)
        return draw

    def behind(self) -> int | None:
        """Return the op that the generator's state follows, if it is a placeholder; else None."""
        draw = self._placeholders.get(_fresh_seed())
        return None if draw is None else draw.behind


def is_default(generator: Any) -> bool:
    """Whether a generator is torch's default one."""
    default: Any = torch.default_generator
    return generator is None or generator._cdata == default._cdata


def _fresh_seed() -> int:
    """Return the default generator's seed, or -1 if numbers were drawn since."""
    default = torch.default_generator
    seed = default.initial_seed()
    fresh = torch.Generator().manual_seed(seed)
    return seed if torch.equal(fresh.get_state(), default.get_state()) else -1


def is_random(func: Callable[..., Any]) -> bool:
    """Whether an op draws numbers.

    torch tags attention as random, but it is the ops inside attention that draw the numbers.
    """
    if not isinstance(func, OpOverload):
        return True
    name = func.__name__
    drawing = torch.Tag.nondeterministic_seeded in func.tags
    return drawing and "attention" not in name and "sdp_choice" not in name


@contextmanager
def rejecting_by(draw: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's trunc_normal_ inside by `draw(original, tensor, *args, generator=…)`."""
    original = getattr(init, REJECTING, None)
    if original is None:  # older versions draw once, without a loop
        yield
        return

    def rejecting(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        return draw(original, tensor, *args, generator=generator)

    with patch.object(init, REJECTING, rejecting):
        yield


def plain_model(factory: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Run a constructor; each random op is seeded by its own number."""
    draws = Draws(seed)

    def one_draw(original: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if tensor.is_meta:  # takes no values
            return tensor
        with draws.one(generator):
            filled: Tensor = original(tensor, *args, generator=generator)
            return filled

    with seeded(seed), rejecting_by(one_draw):
        draws.begin()
        with _NumberedDraws(draws):
            return factory()


class _NumberedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which each random op is one numbered draw."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        keywords = kwargs or {}
        if not is_random(func) or _is_on_meta(args, keywords):
            return func(*args, **keywords)
        with self._draws.one(keywords.get("generator")):
            return func(*args, **keywords)


def _is_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op makes or fills a tensor on meta."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "meta"
    given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    return given is not None and given.is_meta
