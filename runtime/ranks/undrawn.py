"""Computes without random numbers: nothing is dropped out, and constants stand for what is drawn.

No two splits of a model share what they draw, so they are compared without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Run: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

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
_COUNTING = frozenset({torch.randint, torch.randint_like, Tensor.random_})


class Undrawn(TorchFunctionMode):
    """A region in which nothing is drawn."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        del types
        return undrawn(func, args, kwargs or {}, lambda one, given, named: one(*given, **named))


def undrawn(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
    """Call a function of torch by `run`, with a dropout of zero and without random numbers."""
    kwargs = dict(kwargs)
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
    return run(func, args, kwargs)


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


def _without_fifth(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop dropout_p where it stands in its place, behind query, key, value and mask."""
    return args[:4] if len(args) == 5 else args
