"""Turns bytes moved by memory-bound ops into seconds."""

from autopar.planner.costs.kernels.compute import CACHE_SPEEDUP, Throughput


def memory_seconds(moved_bytes: float, *, rates: Throughput, access: float = 1.0) -> float:
    """Return the seconds of one kernel that moves these bytes.

    seconds  = launch + bytes · (r ÷ cache speed + (1 − r) ÷ (stream bandwidth · access))
    resident = r = clamp(2 − bytes ÷ cache, 0, 1)

    The launch is also the ramp: half the bandwidth is reached at launch · bandwidth bytes (4 MB on
    an A100). What fits in the last-level cache was usually just written there by the op before.
    Source: HBM fits of SimuMax for the stream and access fractions; the cache speed is a rounded
    measurement of L2 bandwidth. Leaves out: strided access (pass `access`), atomics, and that the
    op before may have evicted the cache.
    """
    stream_seconds = moved_bytes / (rates.stream_bytes_per_second * access)
    resident = min(1.0, max(0.0, 2.0 - moved_bytes / rates.cache_bytes))
    cached_seconds = moved_bytes / (rates.sheet_bytes_per_second * CACHE_SPEEDUP * access)
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


def norm_forward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a layer or RMS norm: one read, one write, row statistics left out."""
    return elementwise_seconds(elements, element_bytes=element_bytes, passes=2, rates=rates)


def norm_backward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a norm's backward.

    Input gradient: reads x and dy, writes dx; weight gradient: reads both again in a second kernel
    (5 passes in all).
    """
    input_gradient = elementwise_seconds(
        elements, element_bytes=element_bytes, passes=3, rates=rates
    )
    return input_gradient + elementwise_seconds(
        elements, element_bytes=element_bytes, passes=2, rates=rates
    )


def softmax_forward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a softmax with rows on chip: one read, one write, one exp each."""
    return elementwise_seconds(
        elements, element_bytes=element_bytes, passes=2, rates=rates, exponentials=1
    )


def softmax_backward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a softmax's backward: reads y and dy, writes dx."""
    return elementwise_seconds(elements, element_bytes=element_bytes, passes=3, rates=rates)


def dropout_forward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a dropout: reads x, writes y and a mask of one byte."""
    return memory_seconds(elements * (2 * element_bytes + 1), rates=rates)


def dropout_backward_seconds(elements: float, *, element_bytes: float, rates: Throughput) -> float:
    """Return the seconds of a dropout's backward: reads dy and the mask, writes dx."""
    return dropout_forward_seconds(elements, element_bytes=element_bytes, rates=rates)


def embedding_forward_seconds(
    tokens: int, width: int, *, written: int, element_bytes: float, rates: Throughput
) -> float:
    """Return the seconds of a table look-up: gathers one row per token.

    It writes as many rows as it is said to: one per token, or one per bag of tokens.
    """
    moved = float(tokens + written) * width * element_bytes
    return memory_seconds(moved, rates=rates, access=rates.access.gather)


def embedding_backward_seconds(
    tokens: int, width: int, *, vocabulary: int, element_bytes: float, rates: Throughput
) -> float:
    """Return the seconds of a dense table gradient.

    Fills vocabulary × width with zeros, then reads every token's gradient and adds it to its row
    (read and write). Leaves out the sort of the indices.
    """
    fill = memory_seconds(float(vocabulary) * width * element_bytes, rates=rates)
    scatter = 3.0 * tokens * width * element_bytes
    return fill + memory_seconds(scatter, rates=rates, access=rates.access.gather)


def cross_entropy_forward_seconds(
    tokens: int, vocabulary: int, *, element_bytes: float, passes: float, rates: Throughput
) -> float:
    """Return the seconds of a softmax loss over tokens × vocabulary logits.

    `passes` counts reads plus writes of the logits: 1 for a fused kernel; 5 for log_softmax in fp32
    of 16-bit logits (read 1, write 2 as fp32, read 2 for the log). Bandwidth is that of the SimuMax
    cross-entropy fits.
    """
    moved = float(tokens) * vocabulary * element_bytes * passes
    return memory_seconds(moved, rates=rates, access=rates.access.cross_entropy)


def cross_entropy_backward_seconds(
    tokens: int, vocabulary: int, *, element_bytes: float, passes: float, rates: Throughput
) -> float:
    """Return the seconds of softmax − onehot over logits: 2 passes fused, 3 from log_softmax."""
    moved = float(tokens) * vocabulary * element_bytes * passes
    return memory_seconds(moved, rates=rates, access=rates.access.cross_entropy)


def adamw_fused_seconds(
    parameters: float,
    *,
    state_bytes: float,
    gradient_bytes: float,
    copy_bytes: float = 0,
    rates: Throughput,
) -> float:
    """Return the seconds of AdamW in one kernel.

    Per parameter: reads and writes master weight and two moments (3 · 2 · state_bytes), reads the
    gradient, writes the 16-bit copy where there is one (copy_bytes 2). fp32 without a copy: 24 + 4
    = 28 bytes. Leaves out the gradient norm.
    """
    return memory_seconds(parameters * (6 * state_bytes + gradient_bytes + copy_bytes), rates=rates)
