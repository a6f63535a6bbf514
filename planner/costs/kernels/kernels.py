"""Turns shapes of products, convolutions, attention and element-wise ops into seconds."""

from dataclasses import dataclass
from math import prod

from autopar.planner.costs.kernels.rates import Throughput, aligned_share


def gemm_seconds(
    m: int,
    n: int,
    k: int,
    *,
    rates: Throughput,
    batch: int = 1,
    element_bytes: float = 2,
    stored_bytes: float = 2,
    contiguous: int | None = None,
) -> float:
    """Return the seconds of `batch` products of m × k by k × n.

    tiles    = batch · ⌈m/r⌉ · ⌈n/c⌉                for the fastest of a few tile shapes r × c
    w        = tiles ÷ multiprocessors
    t        = k · seconds of a tile for one step along k
    clock    = ⌈w⌉ · overhead of a wave + min(⌈w⌉·t, w·t + balance)
    power    = 2·batch·m·n·k ÷ sustained rate
    traffic  = bytes of operands and result ÷ streaming bandwidth
    seconds  = launch + max(clock ÷ alignment, power, traffic) + exposed share · result's traffic

    `stored_bytes` is traffic per element of the result: 2 to write bf16, 8 to read and write an
    fp32 gradient. `contiguous` is the bitwise or of the extents that are contiguous in memory, by
    default of k and n, as in the forward of a linear layer. The balance is the time to spread the
    last wave over all multiprocessors. At equal alignment, time never falls when m, n or k grows.
    Source: wave quantisation as in NVIDIA's matrix multiplication guide, stream-K (Osama 2023),
    constants fitted on SimuMax's tables of A100-PCIe and B200. Leaves out: that the library may
    choose a slow kernel (most of the error on A100), and that a cold device may exceed its power
    limit for some hundred microseconds (most of the error on B200).
    """
    units = rates.multiprocessors
    wave_seconds = rates.wave_seconds
    clock = float("inf")
    for rows, columns, seconds_per_depth, balance_seconds in rates.tiles:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // units)
        tile_seconds = seconds_per_depth * k
        whole = waves * tile_seconds
        even = tiles / units * tile_seconds + balance_seconds
        seconds = waves * wave_seconds + (whole if whole < even else even)
        if seconds < clock:
            clock = seconds
    extents = k | n if contiguous is None else contiguous
    if extents * element_bytes % 16:
        clock /= aligned_share(extents, element_bytes, rates.alignment)
    power = 2.0 * batch * m * n * k / rates.sustained_flops_per_second
    stored = batch * m * n * stored_bytes / rates.stream_bytes_per_second
    traffic = batch * (m + n) * k * element_bytes / rates.stream_bytes_per_second + stored
    return rates.launch_seconds + max(clock, power, traffic) + rates.store_exposed * stored


TENSOR_CORE_CHANNELS = 8  # per group; with fewer, the contraction is too short for tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape:
    """One convolution; sizes are those of the spatial dimensions, in order."""

    batch: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    groups: int = 1
    element_bytes: float = 2

    @property
    def input_bytes(self) -> float:
        """Size of the input."""
        return self.batch * self.in_channels * prod(self.input_size) * self.element_bytes

    @property
    def output_bytes(self) -> float:
        """Size of the output."""
        return self.batch * self.out_channels * prod(self.output_size) * self.element_bytes

    @property
    def rows(self) -> int:
        """Output positions: the rows of the product."""
        return self.batch * prod(self.output_size)

    @property
    def taps(self) -> int:
        """Positions in the kernel, such as height · width."""
        return prod(self.kernel_size)


def convolution_forward_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds of a convolution in channels-last layout.

    Each group is a product of output positions × (in channels · taps) by (in channels · taps) × out
    channels. The time is the greater of the product without its traffic and the traffic of input
    and output; the input is read once, although windows overlap. With several groups of fewer than
    eight channels (depthwise) only the traffic counts, at the bandwidth of a gather. Source:
    implicit GEMM of cuDNN. Leaves out Winograd and FFT kernels, and idle taps at the borders.
    """
    inputs, outputs = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    return _product_seconds(
        shape, rows=shape.rows, columns=outputs, depth=inputs * shape.taps, rates=rates
    )


def convolution_input_gradient_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds of the input's gradient: the transposed convolution.

    Each group is a product of input positions × d by d × in channels, where d = out channels · taps
    · output positions ÷ input positions.
    """
    inputs, outputs = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    rows = shape.batch * prod(shape.input_size)
    depth = max(1, round(outputs * shape.taps * shape.rows / rows))
    return _product_seconds(shape, rows=rows, columns=inputs, depth=depth, rates=rates)


def convolution_weight_gradient_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds of dW: out channels × positions by positions × (in channels · taps)."""
    inputs, outputs = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    return _product_seconds(
        shape, rows=outputs, columns=inputs * shape.taps, depth=shape.rows, rates=rates
    )


def layout_change_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds that channels-first adds to a pass: input and output are rewritten once.

    Tensor-core kernels read channels-last, so cuDNN transposes before and after them.
    """
    return memory_seconds(2 * shape.input_bytes, rates=rates) + memory_seconds(
        2 * shape.output_bytes, rates=rates
    )


def _product_seconds(
    shape: ConvolutionShape, *, rows: int, columns: int, depth: int, rates: Throughput
) -> float:
    """Return the greater of the product without traffic and the traffic of input and output."""
    moved = shape.input_bytes + shape.output_bytes
    if shape.groups > 1 and shape.in_channels // shape.groups < TENSOR_CORE_CHANNELS:
        return memory_seconds(moved, rates=rates, access=rates.access.gather)
    product = gemm_seconds(
        rows, columns, depth, rates=rates, batch=shape.groups, element_bytes=0, stored_bytes=0
    )
    return max(product, memory_seconds(moved, rates=rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """An attention over `batch` sequences; `visible` is the fraction of unmasked scores."""

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
        """The mean of the head dimensions of keys and of values, which may differ."""
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


def whole_blocks(length: int, block: int) -> int:
    """Return how many queries or keys a GPU kernel computes: more than one block is rounded up."""
    return -(-length // block) * block if length > block else length


def fused_attention_forward_seconds(shape: AttentionShape, *, rates: Throughput) -> float:
    """Return the seconds of the forward of a fused (flash) attention.

    FLOPs    = 2 · (d_qk + d_v) · batch · heads · queries · keys · visible
    work     = max(FLOPs ÷ multiprocessors + FLOPs of `tail` query rows, FLOPs of a query block)
    kernel   = work ÷ rate of a multiprocessor
    rate     = peak · a · d ÷ (d + d₀) [· w if d > 128]    d₀: the time of exp, in head dimensions
    seconds  = launch + max(kernel, FLOPs ÷ sustained, bytes ÷ bandwidth)

    Source: FlashAttention-2 (Dao 2023) for the blocks. The shares a and w, and tail, are fitted on
    SimuMax's tables, which count the FLOPs of the full square for a causal kernel, too. d₀ is an
    estimate, as the tables only have dims 128 and 192. Grouped queries change only the bytes.
    Leaves out dropout (about 10 % when on) and ragged batches.
    """
    facts, shared = rates.architecture, rates.attention
    wide = shared.wide_forward if shape.head_dim > shared.wide_head_dim else 1.0
    share = facts.attention_forward * wide
    moved = (shape.query_elements + shape.key_elements) * shape.element_bytes
    return _fused_seconds(
        shape, rates=rates, share=share, tail=facts.forward_tail_rows, work=1.0, moved=moved
    )


def fused_attention_backward_seconds(shape: AttentionShape, *, rates: Throughput) -> float:
    """Return the seconds of the backward of a fused attention, which computes the scores again.

    The formula is the forward's, with 2.5 times the FLOPs (five matmuls instead of two) and another
    share of peak and tail. The kernel reads q, k, v, o, do and writes dq, dk, dv; it sums dq in
    fp32. Leaves out the sum of dk and dv over grouped queries.
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
    """Return the seconds of a fused kernel.

    `work` is the ratio of its FLOPs to those of a forward, `share` the share of the peak rate that
    it reaches.
    """
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


def memory_seconds(moved_bytes: float, *, rates: Throughput, access: float = 1.0) -> float:
    """Return the seconds of one kernel that moves these bytes.

    seconds  = launch + bytes ÷ access · (r ÷ cache speed + (1 − r) ÷ stream bandwidth)
    resident = r = clamp(2 − bytes ÷ cache, 0, 1)

    The launch time also stands for the ramp: half the bandwidth is reached at launch · bandwidth
    bytes (4 MB on an A100). A tensor that fits in the last-level cache is usually still there from
    the op that wrote it. Source: HBM fits of SimuMax for the stream and access fractions; the cache
    speed is a rounded measurement of L2 bandwidth. Leaves out: strided access (pass `access`),
    atomics, and that other ops may have evicted the tensor from the cache.
    """
    stream_seconds = moved_bytes / (rates.stream_bytes_per_second * access)
    resident = min(1.0, max(0.0, 2.0 - moved_bytes / rates.cache_bytes))
    cache_bytes_per_second = rates.sheet_bytes_per_second * rates.architecture.cache_speedup
    cached_seconds = moved_bytes / (cache_bytes_per_second * access)
    return rates.launch_seconds + resident * cached_seconds + (1.0 - resident) * stream_seconds


def elementwise_seconds(
    elements: float,
    *,
    element_bytes: float,
    passes: float,
    rates: Throughput,
    exponentials: float = 0,
) -> float:
    """Return the seconds of one kernel: max(passes · bytes ÷ bandwidth, exponentials ÷ their rate).

    `passes` counts tensors read plus tensors written: 2 for gelu, 3 for add. `exponentials` counts
    exp, tanh or erf per element; they bind on a CPU (2.2 ns each on one EPYC core) and hardly ever
    on a GPU.
    """
    moved = memory_seconds(elements * element_bytes * passes, rates=rates)
    return max(
        moved, rates.launch_seconds + elements * exponentials / rates.exponentials_per_second
    )


def dropout_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a dropout: reads x, writes y and a mask of one byte.

    Its backward takes as long: it reads dy and the mask, and writes dx.
    """
    return memory_seconds(elements * (2 * element_bytes + 1), rates=rates)


def embedding_forward_seconds(
    tokens: int, width: int, *, written: int, element_bytes: float, rates: Throughput
) -> float:
    """Return the seconds of an embedding: it reads a row of the table per token.

    It writes `written` rows: one per token, or one per bag of tokens.
    """
    moved = float(tokens + written) * width * element_bytes
    return memory_seconds(moved, rates=rates, access=rates.access.gather)


def embedding_backward_seconds(
    tokens: int, width: int, *, vocabulary: int, element_bytes: float, rates: Throughput
) -> float:
    """Return the seconds of the dense gradient of an embedding's table.

    One kernel fills vocabulary × width with zeros. Another reads every token's gradient and adds it
    to a row (read and write). Leaves out the sort of the indices.
    """
    fill = memory_seconds(float(vocabulary) * width * element_bytes, rates=rates)
    scatter = 3.0 * tokens * width * element_bytes
    return fill + memory_seconds(scatter, rates=rates, access=rates.access.gather)


def cross_entropy_seconds(
    tokens: int, vocabulary: int, *, element_bytes: float, passes: float, rates: Throughput
) -> float:
    """Return the seconds of a softmax loss over tokens × vocabulary logits, or of its backward.

    `passes` counts reads plus writes of the logits. Forward: 1 for a fused kernel; 2 for
    log_softmax in the logits' dtype; 5 for log_softmax in fp32 of 16-bit logits (read 1, write 2 as
    fp32, read 2 for the log). Backward, softmax − onehot: 2 if fused, else 4. The bandwidth is
    fitted to SimuMax's cross-entropy.
    """
    moved = float(tokens) * vocabulary * element_bytes * passes
    return memory_seconds(moved, rates=rates, access=rates.access.cross_entropy)
