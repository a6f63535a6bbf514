"""Has a layer that runs again in the backward draw the random numbers of its first forward.

torch.utils.checkpoint keeps the generators of the GPUs that positional tensors lie on, and none
where a layer is called by keywords alone. Here the generators of the CPU and of the GPU are kept,
whatever the layer is given. With selective recomputation an op whose result is kept does not run
again. If it drew numbers (attention with dropout), the second forward sets the generators to where
the op left them in the first one, for what is drawn after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.ranks.generators import States, generator_states, set_generator_states


class DrawnNumbers:
    """The states of the generators before a forward, and after each of its kept ops that draw."""

    def __init__(self) -> None:
        self._before = generator_states()
        self._after_ops: list[States] = []
        self._to_come: Iterator[States] = iter(())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround the second forward; afterwards the generators are as they were before it."""
        now = generator_states()
        set_generator_states(self._before)
        self._to_come = iter(self._after_ops)
        try:
            yield
        finally:
            set_generator_states(now)

    def follow(
        self, first: TorchDispatchMode, again: TorchDispatchMode, is_kept: Callable[[Any], bool]
    ) -> None:
        """Note the states after kept ops of the first forward, and set them in the second."""

        def note(op: Any) -> None:
            if is_kept(op):
                self._after_ops.append(generator_states())

        def skip(op: Any) -> None:
            if is_kept(op):
                set_generator_states(next(self._to_come))

        for mode, after_draw in ((first, note), (again, skip)):
            mode.__class__ = _followed(type(mode))  # type: ignore[arg-type]  # mypy: no Hashable
            mode.__dict__["after_draw"] = after_draw


@lru_cache
def _followed(kind: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """Return the class of modes that call `after_draw` with each op that may draw numbers."""

    class Followed(kind):  # type: ignore[valid-type, misc]
        after_draw: Callable[[Any], None]

        def __torch_dispatch__(
            self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
        ) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                self.after_draw(func)
            return made

    return Followed
