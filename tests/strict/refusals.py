"""Tells which tensors nccl does not take, in the words of its process group."""

from __future__ import annotations

import torch
from torch import Tensor

# torch 2.13's ProcessGroupNCCL, getNcclDataType and check_gpu_single_tensor.
DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)


class RefusedError(RuntimeError):
    """What nccl would not do."""


def refuse(op: str, tensor: Tensor, device_type: str) -> None:
    """Raise where nccl would not send or receive a tensor, or would send other numbers."""
    if tensor.device.type != device_type or tensor.layout is not torch.strided:
        raise RefusedError(
            f"{op}: tensors must be on {device_type} and dense, found one on {tensor.device} "
            f"with the layout {tensor.layout}"
        )
    if tensor.dtype not in DTYPES:
        raise RefusedError(f"{op}: input tensor data type is not supported: {tensor.dtype}")
    if not tensor.is_contiguous():
        # Collectives take channels_last too, if all ranks have it; messages take any strides, and
        # send the memory as it lies.
        raise RefusedError(f"{op}: tensors must be contiguous, found strides {tensor.stride()}")
