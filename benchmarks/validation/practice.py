"""Prices ops on the device with the kernels for attention and loss that published runs had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.costs.kernels.kernels import (
    AttentionShape,
    fused_attention_backward_seconds,
    fused_attention_forward_seconds,
    memory_seconds,
)
from autopar.planner.costs.kernels.rates import Rates
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.costs.ops.kept import KeptTensors, MadeByKernel
from autopar.planner.costs.ops.measurements import Host, OpCost
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Compile, Layers
from autopar.planner.precision import Float8, Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of
from benchmarks.validation.unfused_attention import (
    unfused_attention_backward_seconds,
    unfused_attention_forward_seconds,
)

_LOSS = "aten.cross_entropy_loss.default"
# Bytes per logit of an fp32 loss on 16-bit logits. Forward: the cast (2 + 4), log_softmax (4 + 4).
# Backward: the gradient of the loss (4), its softmax (4 + 4 read, 4 written), the cast (4 + 2).
_LOSS_FORWARD_BYTES, _LOSS_BACKWARD_BYTES = 14, 22
# Kernels with a bias use the warp-wide matrix instructions of Ampere also on later generations:
# FlashAttention-2 reaches 400 TFLOP/s on an H100, version 3 with the wide ones 740 (Shah 2024).
_WIDE_INSTRUCTIONS = ("hopper", "blackwell")
_NARROW_SHARE = 0.55


class Attention(StrEnum):
    """The kernels of attention, and whether its scores are computed again in the backward."""

    FUSED = "fused"
    BIASED = "fused, with a bias on the scores"  # ALiBi: no block of scores is left out
    UNFUSED = "unfused"
    UNFUSED_AGAIN = "unfused, computed again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """Which kernels a run had."""

    attention: Attention
    is_loss_fused: bool  # one kernel on 16-bit logits; otherwise the loss is computed in fp32
    fuses_gradients: bool  # gradients are cast, clipped and copied without separate kernels
    compile: Compile = Compile.NONE
    float8: Float8 = Float8.NONE  # of the linear layers inside the compiled ones


def streaming(rates: Rates) -> Rates:
    """Return rates with memory-bound kernels at full bandwidth, which some of PyTorch's lack."""
    access = replace(
        rates.own.access, casting=1.0, strided=1.0, strided_join=1.0, row_sum=1.0, many_tensors=1.0
    )
    return replace(rates, own=replace(rates.own, access=access))


class PracticePricer(OpPricer):
    """A pricer of device seconds alone, with the kernels of a run; host_work.py adds the host's."""

    stops_early = False

    def __init__(
        self,
        graph: Graph,
        axes: GraphAxes,
        *,
        batch: int,
        precision: Precision,
        device: Device,
        layers: Layers,
        practice: Practice,
    ) -> None:
        super().__init__(
            graph, axes, batch=batch, precision=precision, device=device, layers=layers,
            compile_=practice.compile, float8=practice.float8,
        )  # fmt: skip
        self.practice = practice
        self.fuses_gradients = practice.fuses_gradients
        if practice.fuses_gradients:
            self.rates = streaming(self.rates)

    @cached_property
    def host(self) -> Host:
        """No host time: it is added layer by layer."""
        return Host(forward_seconds=0.0, backward_seconds=0.0, runs_ahead=True)

    def cost(self, op: Op, split: OpSplit | None = None) -> OpCost:
        """Return what an op takes; of attention, all of its kernels."""
        usual = super().cost(op, split)
        if op.target == _LOSS and not self.practice.is_loss_fused:
            return self._loss(op, split, usual)
        if kind_of(op) is not OpKind.ATTENTION or self.practice.attention is Attention.FUSED:
            return usual
        if self.practice.attention is Attention.BIASED:
            return self._biased(op, split, usual)
        return self._unfused(op, split, usual)

    def kept(self, op: Op) -> KeptTensors:
        """Return what an op keeps; unfused attention: softmax, dropout mask, and their product."""
        kept = super().kept(op)
        if op.target == _LOSS and not self.practice.is_loss_fused:
            return replace(kept, made=(MadeByKernel(letters=("n", "v"), item_bytes=4),))
        if kind_of(op) is not OpKind.ATTENTION or self.practice.attention is not Attention.UNFUSED:
            return kept
        scores = ("…", "h", "q", "t")
        sizes = (2, 1, 2) if _dropout(op) else (2,)
        return replace(
            kept, made=tuple(MadeByKernel(letters=scores, item_bytes=size) for size in sizes)
        )

    def _loss(self, op: Op, split: OpSplit | None, usual: OpCost) -> OpCost:
        logits = self.shapes(op, split).numel(op.inputs[0])
        rates = self.rates.own
        return replace(
            usual,
            forward_seconds=memory_seconds(logits * _LOSS_FORWARD_BYTES, rates=rates),
            backward_seconds=memory_seconds(logits * _LOSS_BACKWARD_BYTES, rates=rates),
        )

    def _biased(self, op: Op, split: OpSplit | None, usual: OpCost) -> OpCost:
        shape, rates = self._attention_shape(op, split), self.rates.own
        is_wide = self.device.architecture.casefold().startswith(_WIDE_INSTRUCTIONS)
        share = _NARROW_SHARE if is_wide else 1.0
        return replace(
            usual,
            forward_seconds=fused_attention_forward_seconds(shape, rates=rates) / share,
            backward_seconds=fused_attention_backward_seconds(shape, rates=rates) / share,
        )

    def _unfused(self, op: Op, split: OpSplit | None, usual: OpCost) -> OpCost:
        shape, dropout, rates = self._attention_shape(op, split), _dropout(op), self.rates.own
        forward = unfused_attention_forward_seconds(shape, rates=rates, dropout=dropout)
        backward = unfused_attention_backward_seconds(shape, rates=rates, dropout=dropout)
        again = forward if self.practice.attention is Attention.UNFUSED_AGAIN else 0.0
        return replace(usual, forward_seconds=forward, backward_seconds=backward + again)

    def _attention_shape(self, op: Op, split: OpSplit | None) -> AttentionShape:
        """Return the shape of an attention that computes all scores."""
        shapes = self.shapes(op, split)
        grouped = "k" in shapes.signature.letters
        return AttentionShape(
            batch=shapes.letters("…"),
            heads=shapes.letters("h"),
            kv_heads=shapes.letters("k" if grouped else "h"),
            query_length=shapes.letters("q"),
            key_length=shapes.letters("t"),
            head_dim=shapes.letters("e"),
            value_dim=shapes.letters("f"),
        )


def _dropout(op: Op) -> float:
    given = dict(op.arguments).get("dropout_p", 0.0)
    return float(given) if isinstance(given, (int, float)) else 0.0
