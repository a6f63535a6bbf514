"""Turns the shape of an attention into seconds of a fused kernel."""

from dataclasses import dataclass

from autopar.planner.costs.kernels.compute import Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention over `batch` sequences; `visible` is the share of scores left by the mask."""

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    visible: float = 1.0
    element_bytes: float = 2

    @property
    def mean_dim(self) -> float:
        """Head dimension per matmul: queries and keys have one, values may have another."""
        return (self.head_dim + self.value_dim) / 2

    @property
    def query_elements(self) -> int:
        """Elements of the queries and of the output, together."""
        return self.batch * self.heads * self.query_length * (self.head_dim + self.value_dim)

    @property
    def key_elements(self) -> int:
        """Elements of the keys and of the values, together."""
        return self.batch * self.kv_heads * self.key_length * (self.head_dim + self.value_dim)


def causal_visible(length: int, block: int) -> float:
    """Return the share of score blocks on or under the diagonal: (n + 1) ÷ 2n of n × n blocks."""
    blocks = -(-length // block)
    return (blocks + 1) / (2 * blocks)


def fused_attention_forward_seconds(shape: AttentionShape, *, rates: Throughput) -> float:
    """Return the seconds of a fused (flash) forward.

    FLOPs    = 2 · (d_qk + d_v) · batch · heads · queries · keys · visible
    kernel   = (FLOPs per multiprocessor + some query rows against all keys) ÷ rate of one
    rate     = peak · a · d ÷ (d + d₀) [· w past 128]      d₀: the time of exp, in head dimensions
    seconds  = launch + max(kernel, FLOPs ÷ sustained, bytes ÷ bandwidth)

    Source: FlashAttention-2 (Dao 2023) for the blocks; a, tail and w fitted on SimuMax's tables,
    whose FLOPs are those of the full square for a causal kernel. d₀ is from memory (the tables hold
    dims 128 and 192). Grouped queries change the bytes alone. Leaves out dropout (about 10 % when
    on) and ragged batches.
    """
    facts, shared = rates.architecture, rates.attention
    wide = shared.wide_forward if shape.head_dim > shared.wide_head_dim else 1.0
    share = facts.attention_forward * wide
    moved = (shape.query_elements + shape.key_elements) * shape.element_bytes
    return _fused_seconds(
        shape, rates=rates, share=share, tail=facts.forward_tail_rows, work=1.0, moved=moved
    )


def fused_attention_backward_seconds(shape: AttentionShape, *, rates: Throughput) -> float:
    """Return the seconds of a fused backward, the scores being computed again.

    As the forward with 2.5 times the FLOPs (five matmuls against two) and its own share of peak and
    tail. Bytes: reads q, k, v, o, do and writes dq, dk, dv, dq being summed in fp32. Leaves out the
    sum of dk and dv over grouped queries.
    """
    facts, shared = rates.architecture, rates.attention
    wide = shared.wide_backward if shape.head_dim > shared.wide_head_dim else 1.0
    share = facts.attention_backward * wide
    accumulated = shape.batch * shape.heads * shape.query_length * shape.head_dim * 8
    moved = (
        2.5 * shape.query_elements + 2 * shape.key_elements
    ) * shape.element_bytes + accumulated
    work = shared.backward_flops
    return _fused_seconds(
        shape, rates=rates, share=share, tail=facts.backward_tail_rows, work=work, moved=moved
    )


def _fused_seconds(
    shape: AttentionShape,
    *,
    rates: Throughput,
    share: float,
    tail: float,
    work: float,
    moved: float,
) -> float:
    """Return the seconds of a fused kernel: `work` times a forward's FLOPs, `share` of peak."""
    facts = rates.architecture
    dim = shape.mean_dim
    row_flops = 4.0 * work * dim * shape.key_length
    flops = row_flops * shape.visible * shape.batch * shape.heads * shape.query_length
    unit_rate = (
        rates.peak_flops_per_second
        * share
        * dim
        / (dim + facts.softmax_dims)
        / rates.multiprocessors
    )
    rows = min(facts.query_block, shape.query_length)
    even = flops / rates.multiprocessors + min(tail, shape.query_length) * row_flops
    kernel = max(even, rows * row_flops) / unit_rate
    power = flops / rates.sustained_flops_per_second
    return rates.launch_seconds + max(kernel, power, moved / rates.stream_bytes_per_second)
