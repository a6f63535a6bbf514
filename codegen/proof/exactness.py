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

_MHA_DROPOUT = 10  # where F.multi_head_attention_forward takes dropout_p


_DRAWN = 0.5  # in place of every random number
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples, without their whole parts, lie evenly
_DRAWING = frozenset(
    {
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal,
        Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_,
    }
)  # fmt: skip
_DROPPING = frozenset(
    {
        functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_,
        torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_,
        torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    }
)  # fmt: skip
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_CHOOSING = frozenset({torch.randperm, torch.multinomial, Tensor.multinomial})
_CLASS_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_COUNTING = frozenset({torch.randint, torch.randint_like, Tensor.random_})


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
    """Leaves out dropout and other random numbers too: no two splits share what is drawn."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with a dropout of zero."""
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is functional.gumbel_softmax:
            return _gumbel_softmax(*args, **kwargs)
        if func is functional.rrelu:
            args, kwargs["training"] = args[:3], False
        if func in _RECURRENT:  # their one number that is not whole is the chance to drop
            args = tuple(0.0 if isinstance(one, float) else one for one in args)
        if func in (torch.bernoulli, Tensor.bernoulli_):
            return func(*args, **kwargs).fill_(1)
        if func in _DRAWING:
            drawn = func(*args, **kwargs).fill_(_DRAWN)
            return _spread(drawn) if func is torch.rand else drawn
        if func in _COUNTING:
            return func(*args, **kwargs).fill_(_middle(args, kwargs))
        if func in _CHOOSING:
            chosen = func(*args, **kwargs)
            return chosen.copy_(torch.arange(chosen.shape[-1], device=chosen.device))
        if func is functional.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = _without_fifth(args), 0.0
        if func is functional.multi_head_attention_forward:
            args = (*args[:_MHA_DROPOUT], 0.0, *args[_MHA_DROPOUT + 1 :])
        return super().__torch_function__(func, types, args, kwargs)


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


def _spread(drawn: Tensor) -> Tensor:
    """Give every row of a mask of places the same numbers, some below each chance.

    With one number for all, `torch.rand(rows, places) < 0.15` masks nothing: the loss is no number.
    """
    if drawn.dim() != 2:
        return drawn
    places = torch.arange(drawn.shape[1], device=drawn.device, dtype=torch.float64)
    return drawn.copy_((_DRAWN + _GOLDEN * places) % 1)


def _middle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number in the middle of those that randint and its kin draw from."""
    ends = [one for one in args if isinstance(one, int)]
    ends += [kwargs[name] for name in ("from", "low", "to", "high") if kwargs.get(name) is not None]
    low, high = (0, 0, *ends)[-2:]
    return (low + high) // 2


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Do what the function does whose draws, made within it, are all the same."""
    del eps
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(soft).scatter_(dim, index, 1.0) - soft.detach() + soft


def _with_wide_weights(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a loss the weights of its classes, which a model file may hold, as wide as the model."""
    wide = None if weight is None else weight.to(scores.dtype)
    return (scores, target, wide, *args), kwargs


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def _without_fifth(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop dropout_p where it stands in its place, behind query, key, value and mask."""
    return args[:4] if len(args) == 5 else args
