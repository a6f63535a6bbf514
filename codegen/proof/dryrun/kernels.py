"""Lets ops allocate and keep, on the CPU, what a CUDA device's kernels would.

Some ops are one kernel there and many on a CPU, which keep more for the backward: an RMS norm (its
input in fp32, twice), dropout (the mask in the values' own dtype) and attention with dropout (all
scores). What a kernel takes as its own workspace while it runs is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

_attention = functional.scaled_dot_product_attention


class _RMSNorm(torch.autograd.Function):
    """One kernel that keeps its input, the weight and a figure per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        per_row = torch.empty(x.shape[: x.dim() - dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, per_row)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        x, weight = ctx.saved_tensors[:2]
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(x), of_weight, None


def _rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001
) -> Tensor:
    out: Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


def _dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> Tensor:
    return torch.native_dropout(input, p, train=True)[0] if training and p else input


def _attention_with_dropout(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
    del dropout_p  # fused: it is kept as the state of a random generator
    out: Tensor = _attention(*args[:4], *args[5:], **options)
    return out


def _channel_statistics(_: Tensor, mean: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)  # torch has no shapes for this op


REPLACED = (
    (functional, "rms_norm", _rms_norm),
    (torch, "rms_norm", _rms_norm),
    (functional, "dropout", _dropout),
    (torch, "dropout", _dropout),
    (functional, "scaled_dot_product_attention", _attention_with_dropout),
    (torch, "batch_norm_update_stats", _channel_statistics),
)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Put the stand-ins in the place of torch's functions."""
    with ExitStack() as stack:
        for owner, name, stand_in in REPLACED:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
