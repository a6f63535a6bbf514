"""The dtypes of a training, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.graph.ops import MODEL_DTYPE


class Precision(StrEnum):
    """The dtype of the model's own floating tensors in training."""

    FP32 = "fp32"
    BF16 = "bf16"  # bf16 weights and activations, fp32 gradients, master weights and moments
    FP16 = "fp16"  # the same in fp16, with a loss scale

    @property
    def torch_name(self) -> str:
        """torch's name."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.value]

    @property
    def is_half(self) -> bool:
        """Whether weights and activations take 16 bits."""
        return self is not Precision.FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What kernels save: flash attention always; a dropout mask of one byte if fused."""

    fused_dropout: bool = True


FUSED = Kernels()

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bool": 1, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "f32": 4,
     "i64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
     # complex numbers of the model's own dtype, traced in float64
     "complex64": 8, "complex128": 8}
)  # fmt: skip

GRADIENT_BYTES = 4  # of one element: fp32 under every precision


def item_bytes(dtype: str, precision: Precision) -> int:
    """Return the bytes of one element."""
    if dtype == MODEL_DTYPE:
        return 2 if precision.is_half else 4
    return ITEM_BYTES[dtype]


def optimizer_bytes(precision: Precision, moments: float) -> float:
    """Return an optimizer's bytes per element: fp32 moments, and a master weight beside 16 bits."""
    return 4 * (moments + precision.is_half)


def copy_bytes(precision: Precision) -> int:
    """Return the bytes per element that an optimizer step moves beside fp32 states.

    The new 16-bit weight is written. With fp16 the gradient is read and written once more, to
    unscale it and to check for overflow.
    """
    return {Precision.FP32: 0, Precision.BF16: 2, Precision.FP16: 2 + 2 * GRADIENT_BYTES}[precision]
