"""Turns the layout columns of a row into an arrangement, a recompute mode and kernels.

What a table does not state is assumed as is usual for the techniques of the run:

    gradients     in 16 bits if training in fp16, in 32 bits if in bf16; a bf16 run reduces them in
                  16 bits if the text says PURE. DeepSpeed's bf16 optimizer keeps 16-bit gradients
                  beside the 32-bit ones (clear_lp_grads=False). Matrix products add to 32-bit
                  gradients directly, as in Megatron, except with DeepSpeed, PyTorch's own
                  trainers, ZeRO-2 and ZeRO-3
    casts         separate kernels cast, clip and copy gradients with ZeRO-2, ZeRO-3, PyTorch's own
                  trainers and DeepSpeed's bf16 optimizer; elsewhere they are fused
    float8        fp8: one scale for each tensor, torchao's default, unless the text says rowwise;
                  weights are gathered in 16 bits, unless it says float8 all-gather
    loss          in fp32, unless the text says that it is one kernel
    compiled      layers of PyTorch's own trainers; their messages are fused with products if the
                  notes say async TP
    overlap       FSDP and distributed optimizers reduce bucket by bucket during the backward; plain
                  data parallel training and ZeRO-1 reduce after it
    dropout       0.1 if attention is not a flash kernel, none if it is
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.planner.costs.prediction import Arrangement, Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.layers import Compile
from autopar.planner.precision import Compression, Float8, Precision
from benchmarks.validation.practice import Attention, Practice
from benchmarks.validation.table import Row, stated

WHOLE_BUCKET = 2**62  # bytes: one bucket, so one reduction after the backward
USUAL_BUCKET = 160_000_000  # bytes: 40 million fp32 gradients, Megatron's usual bucket
_OVERLAPS = re.compile(r"overlap-grad-reduce|overlap dp", re.IGNORECASE)
_NEVER_OVERLAPS = re.compile(r"no comm overlap|no[- ]grad(ient)?[- ]bucket", re.IGNORECASE)
_PURE = re.compile(r"mixed_precision=pure", re.IGNORECASE)
_PYTORCH = re.compile(r"torchtune|torchtitan|pytorch/ao", re.IGNORECASE)
_OTHER_SCALES = re.compile(r"rowwise_with_gw_hp", re.IGNORECASE)  # gradients of weights in bf16
_DEEPSPEED = re.compile(r"deepspeed", re.IGNORECASE)
_FUSED_LOSS = re.compile(r"\bce fusion", re.IGNORECASE)
_ASYNC_TENSOR = re.compile(r"async ?tp", re.IGNORECASE)
_GROUP = re.compile(r"(?:group|shard)\s+(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """The recompute mode of the layers; every second layer may have another one, `second`."""

    recompute: Recompute
    second: Recompute
    attention_only: bool = False  # selective, with only scores and softmax recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, in the terms of the planner."""

    arrangement: Arrangement
    remade: Remade
    practice: Practice
    dropout: float
    has_narrow_gradients: bool  # 16-bit gradients, and an fp32 copy beside the optimizer's state
    has_both_gradients: bool  # 16-bit gradients beside the 32-bit ones that accumulate them
    adds_in_products: bool  # products add to 32-bit gradients directly, as in Megatron
    is_sequence_parallel: bool


_ATTENTION_ONLY = Remade(
    recompute=Recompute.SELECTIVE, second=Recompute.SELECTIVE, attention_only=True
)
_REMADE: Mapping[str, Remade] = MappingProxyType(
    {
        "none": Remade(recompute=Recompute.NONE, second=Recompute.NONE),
        "full": Remade(recompute=Recompute.FULL, second=Recompute.FULL),
        "selective": _ATTENTION_ONLY,
        "selective (attention core)": _ATTENTION_ONLY,
        # Every second product of a layer is saved; modelled as all products of every second layer.
        **dict.fromkeys(
            ("selective (op)", "selective (per op)"),
            Remade(recompute=Recompute.SELECTIVE, second=Recompute.FULL),
        ),
        **dict.fromkeys(
            ("selective (layer)", "full on every second layer"),
            Remade(recompute=Recompute.FULL, second=Recompute.NONE),
        ),
    }
)

# Words of the sharding column → level; the first that is found counts.
_SHARDING: tuple[tuple[str, Zero], ...] = (
    ("zero-3", Zero.PARAMETERS),
    ("zero3", Zero.PARAMETERS),
    ("full_shard", Zero.PARAMETERS),
    ("full shard", Zero.PARAMETERS),
    ("hsdp", Zero.PARAMETERS),
    ("zero-2", Zero.GRADIENTS),
    ("zero2", Zero.GRADIENTS),
    ("shard_grad_op", Zero.GRADIENTS),
    ("zero-1", Zero.OPTIMIZER),
    ("distributed optimizer", Zero.OPTIMIZER),
    ("fsdp", Zero.PARAMETERS),
    ("zero-0", Zero.NONE),
    ("none", Zero.NONE),
    ("ddp", Zero.NONE),
)


def settings_of(row: Row) -> Settings:
    """Return the settings of a fully specified row; raise if they are not modelled."""
    pipeline, data, microbatch = stated(row.pp), stated(row.dp), stated(row.micro_batch)
    is_interleaved = pipeline > 1 and (row.vpp or 1) > 1
    zero = _zero(row)
    is_flash = row.flash_attention is not False
    remade = remade_of(row.recompute)
    is_deepspeed = bool(_DEEPSPEED.search(row.notes))
    is_plain = bool(_PYTORCH.search(row.source))
    has_both = row.dtype == "bf16" and is_deepspeed
    float8 = float8_of(row) or Float8.NONE
    gathers = "float8 all-gather" in row.notes
    arrangement = Arrangement(
        pipeline=pipeline,
        data=data,
        tensor=stated(row.tp),
        shard=_shard(row, zero),
        microbatch=microbatch,
        microbatches=stated(row.global_batch) // (data * microbatch),
        schedule=ScheduleKind.INTERLEAVED_1F1B if is_interleaved else ScheduleKind.ONE_F_ONE_B,
        stages_per_rank=stated(row.vpp) if is_interleaved else 1,
        zero=zero,
        bucket_bytes=USUAL_BUCKET if _overlaps(row) else WHOLE_BUCKET,
        compression=Compression.HALF if _PURE.search(row.notes) else Compression.NONE,
        precision=Precision.BF16,
        float8=float8 if gathers else Float8.NONE,
    )
    return Settings(
        arrangement=arrangement,
        remade=remade,
        practice=Practice(
            attention=_attention(row, remade),
            is_loss_fused=bool(_FUSED_LOSS.search(row.notes)),
            fuses_gradients=zero < Zero.GRADIENTS and not has_both and not is_plain,
            compile=_compile(row, is_plain=is_plain),
            float8=float8,
        ),
        dropout=0.0 if is_flash else 0.1,
        has_narrow_gradients=row.dtype == "fp16",
        has_both_gradients=has_both,
        adds_in_products=zero < Zero.GRADIENTS and not is_deepspeed and not is_plain,
        is_sequence_parallel=bool(row.sp) and stated(row.tp) > 1,
    )


def _compile(row: Row, *, is_plain: bool) -> Compile:
    """Return what is compiled, and whether messages are fused (asynchronous tensor parallelism)."""
    if row.torch_compile is not True or not is_plain:
        return Compile.NONE
    return Compile.FUSED if _ASYNC_TENSOR.search(row.notes) else Compile.LAYERS


def float8_of(row: Row) -> Float8 | None:
    """Return the scales of torchao's products in compiled layers; None if a row has none."""
    is_known = row.torch_compile is True and _PYTORCH.search(row.source)
    if not is_known or _OTHER_SCALES.search(row.notes):
        return None
    if row.dtype == Float8.MXFP8:
        return Float8.MXFP8
    if row.dtype != "fp8":
        return None
    return Float8.ROWWISE if "rowwise" in row.notes.casefold() else Float8.TENSORWISE


def _attention(row: Row, remade: Remade) -> Attention:
    """Return the kernels of attention; MPT's positions are a bias on the scores (ALiBi)."""
    if row.flash_attention is not False:
        return Attention.BIASED if "mpt" in row.model_family.casefold() else Attention.FUSED
    return Attention.UNFUSED_AGAIN if remade.attention_only else Attention.UNFUSED


def remade_of(text: str) -> Remade:
    """Return what the recompute column says."""
    key = text.casefold().strip()
    if key not in _REMADE:
        raise InputError(f"recompute {text!r} is not modelled")
    return _REMADE[key]


def _zero(row: Row) -> Zero:
    """Return the level of the sharding column; ZeRO-1 (distributed optimizer) if it names none."""
    text = row.fsdp.casefold()
    return next((level for word, level in _SHARDING if word in text), Zero.OPTIMIZER)


def _shard(row: Row, zero: Zero) -> int:
    data = stated(row.dp)
    group = _GROUP.search(row.fsdp)
    if zero is Zero.NONE:
        return 1
    shard = min(int(group[1]), data) if group else data
    if data % shard:
        raise InputError(f"{data} data ranks do not divide into shards of {shard}")
    return shard


def _overlaps(row: Row) -> bool:
    told = f"{row.fsdp}; {row.notes}"
    if _NEVER_OVERLAPS.search(told):
        return False
    text = row.fsdp.casefold()
    is_plain = text.startswith(("none", "ddp", "zero-0", "zero-1")) and "optimizer" not in text
    return bool(_OVERLAPS.search(told)) or not is_plain
