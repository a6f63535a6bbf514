"""Turns a model's constructor into the model that plain PyTorch makes of it, on the CPU.

Nothing is recorded, replayed or pretended. Each random op is seeded by its number (see draws.py),
so these are the weights that a plan starts from, and an independent reference for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.weights.draws import Draws, is_random, rejecting_by


def plain_model(factory: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Run a constructor, each random op of it seeded by its own number."""
    draws = Draws(seed)

    def one_draw(original: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if tensor.is_meta:  # takes no numbers
            return tensor
        with draws.one(generator):
            filled: Tensor = original(tensor, *args, generator=generator)
            return filled

    with seeded(seed), rejecting_by(one_draw):
        draws.begin()
        with _NumberedDraws(draws):
            return factory()


class _NumberedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region in which each random op is one draw, and runs as it is."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op."""
        keywords = kwargs or {}
        if not is_random(func) or _is_on_meta(args, keywords):
            return func(*args, **keywords)
        with self._draws.one(keywords.get("generator")):
            return func(*args, **keywords)


def _is_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op makes or fills a tensor that has no numbers."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "meta"
    given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    return given is not None and given.is_meta
