"""Makes trainings comparable to the last digits: no float32 among float64, nothing drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.runtime.ranks.undrawn import undrawn

_CLASS_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class Widely(TorchFunctionMode):
    """Leaves out casts of float64 to float32.

    A model that pins its logits to float32 would round away what is compared: sums over other rows
    differ there by 1e-7, right or wrong. In a training in float64, what is made from nothing is
    float64 too, and numbers that a model writes down are those of its training in float32.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.default = torch.get_default_dtype()

    def __enter__(self) -> Self:
        """Begin, with the type of the training as that of new tensors."""
        if self.dtype is torch.float64:
            torch.set_default_dtype(self.dtype)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End, with the type of new tensors as it was before."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self.default)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with what was float64 staying so."""
        del types
        kwargs = dict(kwargs or {})
        if func in _BACKWARD:
            with _engine_within(type(self)(self.dtype)):
                return func(*args, **kwargs)
        if func is torch._grouped_mm and args[0].dtype is torch.float64:
            return _product_by_groups(*args, **kwargs)
        is_wide = self.dtype is torch.float64
        if is_wide or any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in args):
            func = Tensor.double if func is Tensor.float else func
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
            if func in _CLASS_LOSSES:
                args, kwargs = _with_wide_weights(*args, **kwargs)
        made = func(*args, **kwargs)
        if is_wide and func is torch.tensor and made.is_floating_point():
            return made.float().double()
        return made


class Exactly(Widely):
    """Leaves out dropout and other random numbers too."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with a dropout of zero."""

        def run(one: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return super(Exactly, self).__torch_function__(one, types, given, named)

        return undrawn(func, args, kwargs or {}, run)


@contextmanager
def _engine_within(mode: Widely) -> Iterator[None]:
    """Have backwards run in a mode, too: layers that compute again do so as the first time.

    torch takes a mode away while the mode handles a call, here for as long as a backward takes.
    """
    torch_autograd: Any = torch.autograd
    run = torch_autograd._engine_run_backward

    def run_within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    torch_autograd._engine_run_backward = run_within
    try:
        yield
    finally:
        torch_autograd._engine_run_backward = run


def _product_by_groups(rows: Tensor, matrices: Tensor, offs: Tensor, **_: None) -> Tensor:
    """Multiply each group of rows by its matrix; torch's own kernel has 32 bits at most."""
    ends = [int(end) for end in offs]
    sizes = [end - start for start, end in pairwise([0, *ends, len(rows)])]
    *groups, rest = torch.split(rows, sizes)
    made = [group @ matrix for group, matrix in zip(groups, matrices, strict=True)]
    return torch.cat([*made, rest.new_zeros((len(rest), matrices.shape[-1]))])


def _with_wide_weights(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a loss the weights of its classes, which a model file may hold, as wide as the model."""
    wide = None if weight is None else weight.to(scores.dtype)
    return (scores, target, wide, *args), kwargs


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
