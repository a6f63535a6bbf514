"""Makes batch norms use statistics of all ranks, and fp32 weights where kernels need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from autopar.runtime.model.parts import class_with_forward
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import gathered, summed


def synchronise_batch_norms(module: nn.Module, axis: Axis) -> None:
    """Make every batch norm of a module take its statistics over all ranks of an axis.

    The norms get a subclass of their class: parameters, buffers and names stay as they are.
    """
    if axis.size == 1:
        return
    for child in module.modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, _Synchronised):
            kind = class_with_forward(child)
            child.__class__ = type(f"Synchronised{kind.__name__}", (_Synchronised, kind), {})
            child.__dict__["axis"] = axis


def widen_norms(module: nn.Module) -> None:
    """Make norms with 16-bit weights and running statistics compute with fp32 weights.

    With 16-bit inputs, CPU kernels accept only fp32 weights, and cuDNN is fastest with them.
    """
    for child in module.modules():
        keeps = isinstance(child, _BatchNorm) or getattr(child, "track_running_stats", False)
        if isinstance(child, _NormBase) and keeps and not isinstance(child, _ALREADY):
            kind = class_with_forward(child)
            child.__class__ = type(f"Widened{kind.__name__}", (_Widened, kind), {})


class _Replacing(TorchFunctionMode):
    """A mode that calls other functions in place of torch's, inside a norm's own forward."""

    def __init__(self, others: Mapping[Callable[..., Any], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other: Callable[..., Any] = self.others.get(func, func)
        return other(*args, **(kwargs or {}))


class _Widened(_NormBase):
    """A norm whose weights are cast to fp32 during its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the norm's class."""
        with _Replacing(_WIDENED):
            return super().forward(*args, **kwargs)


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widened(
        input: Tensor,  # noqa: A002  as torch calls it
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        weight, bias = (None if one is None else one.float() for one in (weight, bias))
        return function(input, running_mean, running_var, weight, bias, *args, **kwargs)

    return widened


_FUNCTIONS = (functional.batch_norm, functional.instance_norm)
_WIDENED: Mapping[Any, Any] = {function: _widened(function) for function in _FUNCTIONS}


class _Synchronised(_BatchNorm):
    """A batch norm whose statistics are taken over all ranks of an axis."""

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the norm's class; training uses the statistics of the whole axis."""
        with _Replacing({functional.batch_norm: self._normalised}):
            return super().forward(*args, **kwargs)

    def _normalised(
        self,
        input: Tensor,  # noqa: A002  as torch calls it
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            assert running_mean is not None
            assert running_var is not None
            return _scaled(input, running_mean, running_var, weight, bias, eps)
        arguments = (running_mean, running_var, eps, momentum, self.axis)
        output = _Normalise.apply(input, weight, bias, *arguments)  # type: ignore[no-untyped-call]
        assert isinstance(output, Tensor)
        return output


_ALREADY = (_Synchronised, _Widened)


class _Normalise(torch.autograd.Function):
    """Batch norm with one collective in the forward and one in the backward, on any device.

    torch's SyncBatchNorm masks out ranks without rows, which makes the host wait in each forward.
    It also copies channels_last inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        axis: Axis,
    ) -> Tensor:
        """Normalise x [batch, channels, …]."""
        mean, variance, count = _statistics(x, axis)
        if running_mean is not None and running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.axis, ctx.eps = axis, eps
        return _scaled(x, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias; the latter two are sums over own rows only.

        With x̂ the normalised input and sums over all ranks' N samples of a channel:

            ∂x  =  scale · (∂y − Σ ∂y ÷ N − x̂ · Σ ∂y·x̂ ÷ N)
        """
        x, weight, mean, variance, count = ctx.saved_tensors
        (gradient,) = gradients
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, None, None, mean, inverse, True, ctx.eps, [False, True, True]
        )
        sums = summed(torch.stack([of_weight, of_bias]), ctx.axis)
        product, plain = -scale * sums / count
        of_x = _scaled(x, mean, variance, product, plain, ctx.eps)
        of_x.addcmul_(gradient, _wide(scale, x).to(x.dtype))
        if weight is None:
            return of_x, *[None] * 7
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), *[None] * 5


def _statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count over all ranks, joined by Chan's formula.

    Sums of squares would also take one collective, but are inexact if the mean is large.
    """
    channels = x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    unused, unread = x.new_zeros((2, channels), dtype=wide)  # only give the outputs their dtype
    mean, variance = torch.batch_norm_update_stats(x, unused, unread, 0.0)
    count = mean.new_full((1,), x.numel() // channels)
    all_ranks = gathered(torch.cat([mean, variance, count]), axis)
    means, variances, counts = all_ranks.split([channels, channels, 1], dim=1)  # type: ignore[no-untyped-call]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total


def _scaled(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return (x − mean) ÷ √(variance + eps) · weight + bias, in one pass over x."""
    weight, bias = (None if one is None else one.to(mean.dtype) for one in (weight, bias))
    return functional.batch_norm(x, mean, variance, weight, bias, eps=eps)


def _wide(per_channel: Tensor, like: Tensor) -> Tensor:
    """Reshape [channels] so that it broadcasts over [batch, channels, …]."""
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))
