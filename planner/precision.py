"""Choices that change the results of a training: dtypes, and methods to be allowed by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from autopar.planner.graph.ops import MODEL_DTYPE

GRADIENT_BYTES = 4  # of one element: fp32 under every precision


class RowEnum(StrEnum):
    """An enum of names. Each member has a row of values for the attributes that the class lists."""

    _value_: str

    def __new__(cls, name: str, *row: Any) -> Self:
        """Return a member whose attributes have the values of its row."""
        one = str.__new__(cls, name)
        one._value_ = name
        for attribute, value in zip(cls.__annotations__, row, strict=True):
            setattr(one, attribute, value)
        return one


class Precision(RowEnum):
    """The dtype of a model's floats in training; with 16 bits, the optimizer keeps fp32 weights."""

    torch_name: str
    item_bytes: int  # of weights and activations
    scales_loss: bool  # small gradients would become 0: below 6e-8 in fp16
    # dtypes of a device's matrix units. Those of the first dtype compute the products. MFU is
    # relative to their peak, or to that of the next dtype if the device has no such units
    peaks: tuple[str, ...]
    products: str  # for torch.set_float32_matmul_precision; torch's default if empty
    words: str  # in help texts, after the name

    FP32 = "fp32", "float32", 4, False, ("fp32",), "", ""
    TF32 = "tf32", "float32", 4, False, ("tf32",), "high", "fp32 whose products GPUs round"
    BF16 = "bf16", "bfloat16", 2, False, ("bf16", "fp16", "fp32"), "", "the default"
    FP16 = "fp16", "float16", 2, True, ("fp16", "fp32"), "", "its loss scaled"

    @property
    def is_half(self) -> bool:
        """Whether weights and activations take 16 bits."""
        return self.item_bytes == 2

    @property
    def units(self) -> str:
        """The dtype of the units that compute matrix products."""
        return self.peaks[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastBytes:
    """The bytes that kernels move to cast an element of a factor to float8, and to scale results.

    They read elements of 16 bits, find the largest ones, and write elements of 8 bits: once with
    contiguous rows and once with contiguous columns, because every factor belongs to two of a
    layer's three products. The numbers are torchao's (testing/training/roofline_utils.py), and
    1/32 for each element written with a scale for 32 of them.
    """

    source: float = 0  # of a layer's input, in the forward
    source_again: float = 0  # in the backward
    weight: float = 0  # in the forward
    weight_again: float = 0  # in the backward
    result_gradient: float = 0
    scaled_gradient: float = (
        0  # of a gradient that a product computes, and that is scaled afterwards
    )


_SCALES = 1 / 32  # bytes for an element, if 32 share a scale of a byte


class Float8(RowEnum):
    """How compiled linear layers scale the factors of products in float8, by torchao.

    Separate kernels cast the factors. `rate` was fitted to three of the five published rowwise
    runs; the other two were held out (docs/accuracy.md).
    """

    units: str  # the dtype, in a device's peaks, of the units that compute the products
    multiple: int  # both sizes of a weight must be multiples: the kernels take no others
    precisions: tuple[Precision, ...]  # of weights and activations
    casts: CastBytes
    gathers: bool  # ZeRO-3 gathers weights in float8: a part is cast by the scale of the whole
    rate: float  # of products, relative to those at the peak of the units
    scale_bytes: float  # of an element in float8
    words: str

    # name, units, multiple, precisions, casts, gathers, rate, bytes of scales, words
    NONE = "none", "", 1, tuple(Precision), CastBytes(), False, 1.0, 0.0, "as the layers are"
    TENSORWISE = (
        *("tensorwise", "fp8", 16, (Precision.BF16, Precision.FP16)),
        CastBytes(source=6, weight=5, weight_again=3, result_gradient=6),
        *(True, 1.0, 0.0, "one scale for a tensor: fastest"),
    )
    ROWWISE = (
        *("rowwise", "fp8", 16, (Precision.BF16, Precision.FP16)),
        CastBytes(source=8, weight=3, weight_again=7, result_gradient=8, scaled_gradient=4),
        *(False, 0.7, 0.0, "one for each row and column: more exact"),
    )

    MXFP8 = (
        *("mxfp8", "mxfp8", 32, (Precision.BF16,)),
        CastBytes(
            source=3 + _SCALES,
            source_again=3 + _SCALES,
            weight=3 + _SCALES,
            weight_again=3 + _SCALES,
            result_gradient=6 + 2 * _SCALES,
        ),
        *(False, 1.0, _SCALES, "one for each 32 elements of a row or column"),
    )


class Allowed(StrEnum):
    """A choice that changes what is learnt: the search makes it only if it is allowed by name."""

    LOCAL_STEPS = "local-steps"
    INT8, POWERSGD = "int8", "powersgd"  # a Compression of the same name


SCALED_TOGETHER = 256  # gradients in int8 that share a scale; as many as in runtime/data_parallel


class Compression(RowEnum):
    """How gradients are sent where data ranks average them; it changes what is learnt."""

    share: float  # of the bytes of fp32 that are sent
    # What is lost on the way is added to the next gradients. So each rank keeps it, and gradients
    # are averaged once in a step, in buckets.
    keeps_lost: bool
    buffer_share: float  # of a bucket in fp32: the memory of what is sent, and of rounding
    moved_bytes: int  # for each element, by kernels that round
    is_low_rank: bool  # matrices are sent as products of thin ones
    words: str  # in descriptions of a plan
    sums: str  # how data ranks sum gradients, in words

    # name, share, keeps what is lost, buffer share, bytes moved, is low rank, words, sums
    NONE = "none", 1.0, False, 0.0, 0, False, "", "in 32 bits"
    HALF = "half", 0.5, False, 0.5, 0, False, "16-bit gradient sums", "in 16 bits"
    # A block has a scale of 4 bytes. Kernels read and write for an element: the sum with what was
    # lost (12), the largest element (4), steps (24), int8 (5), floats again (13), what is lost now
    # (12). The pieces of all ranks are added up (17), and the mean is unpacked (13).
    INT8 = (
        *("int8", (SCALED_TOGETHER + 4) / (4 * SCALED_TOGETHER), True, 1.5, 100),
        *(False, "int8 gradient sums", "in 8 bits"),
    )
    # How much is sent depends on the sizes of matrices (`thin_bytes`). Products of thin matrices
    # are bound by memory. Kernels read and write for an element: the sum with what was lost (12),
    # both products (8), what is lost now (12 + 8), the sum (12).
    POWERSGD = "powersgd", 0.0, True, 0.5, 52, True, "PowerSGD gradient sums", "by PowerSGD"

    @property
    def rounds_sums(self) -> bool:
        """Whether ranks round what they add up, in an order that no other process can repeat."""
        return self.share < 1 and not self.keeps_lost


_RANK = 4  # of PowerSGD


def thin_bytes(rows: int, elements: int) -> int:
    """Return the fp32 bytes that PowerSGD sends of a gradient with this first dim.

    A matrix becomes two of 4 columns, unless these have more than half of its elements.
    """
    columns = elements // rows if rows else 0
    thin = _RANK * (rows + columns)
    is_thin = columns > 1 and 2 * thin <= elements
    return GRADIENT_BYTES * (thin if is_thin else elements)


def precision_words() -> str:
    """Return all precisions for help texts: "bf16 (the default), fp32, …"."""
    return ", ".join(
        f"{one.value} ({one.words})" if one.words else one.value for one in sorted(Precision)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a device has.

    With `fused_dropout` (GPUs), a dropout saves a mask of bytes, and attention with dropout is one
    kernel. Otherwise (CPUs), a dropout saves its noise, and such attention is several kernels.
    """

    fused_dropout: bool = True


FUSED = Kernels()

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bool": 1, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "f32": 4,
     "i64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
     # 8 for both: a trace in float64 shows complex128, where the training has complex64
     "complex64": 8, "complex128": 8}
)  # fmt: skip


def item_bytes(dtype: str, precision: Precision) -> int:
    """Return the bytes of one element."""
    if dtype == MODEL_DTYPE:
        return precision.item_bytes
    return ITEM_BYTES[dtype]


def optimizer_bytes(precision: Precision, moments: float) -> float:
    """Return an optimizer's bytes per element: fp32 moments, and for 16 bits a master weight."""
    return 4 * (moments + precision.is_half)


LOCAL_STEPS = 64  # between two outer steps, where no other number is declared
LEAST_OF_PART = 2  # local steps for each part that has outer steps of its own


class Outer(RowEnum):
    """The optimizer that applies the mean of the replicas' changes over their local steps."""

    rate: float
    momentum: float  # Nesterov's
    copies: int  # fp32 tensors beside the parameters: the last common ones, and the momentum

    NONE = "none", 0.0, 0.0, 0
    NESTEROV = "nesterov", 0.7, 0.9, 2  # DiLoCo (Douillard et al., 2023)
    AVERAGE = "average", 1.0, 0.0, 1  # the mean of all parameters: local SGD (Stich, 2019)


# Losses of models after 300 steps, without the choice and with it. The tables of
# docs/slow-networks.md say how they were trained.
LEARNT: Mapping[StrEnum, tuple[tuple[str, float, float], ...]] = MappingProxyType(
    {
        Compression.INT8: (
            ("gpt2", 1.5199, 1.5199),
            ("mnist", 0.0008, 0.0008),
            ("intent", 1.7529, 1.7529),
        ),
        Compression.POWERSGD: (
            ("gpt2", 1.5199, 1.6226),
            ("mnist", 0.0008, 0.0024),
            ("intent", 1.7529, 1.7537),
        ),
        Outer.NESTEROV: (
            ("gpt2", 1.4978, 1.4981),
            ("mnist", 0.0006, 0.0000),
            ("resnet", 0.0005, 0.0004),
        ),
        Outer.AVERAGE: (
            ("gpt2", 1.4978, 1.5778),
            ("mnist", 0.0006, 0.0020),
            ("resnet", 0.0005, 0.0012),
        ),
    }
)


def learnt_words(choice: Compression | Outer) -> str:
    """Return a sentence with the losses of small models, with a choice and without it."""
    told = (f"{own:.4f} instead of {whole:.4f} ({name})" for name, whole, own in LEARNT[choice])
    how = ", 50 local steps to each outer step" if isinstance(choice, Outer) else ""
    after = f"Losses of small models after 300 steps{how}"
    return f"{after}: {', '.join(told)}; see docs/slow-networks.md."
