"""Turns shapes of norms into seconds."""

from dataclasses import dataclass

from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.kernels.rates import BatchNormConstants, Throughput

# PyTorch's kernel for the gradients of weight and bias also splits the rows over thread blocks, if
# there are many rows and few columns.
_COLUMNS = 32  # of a thread block
_MANY_ROWS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """The input of a norm over rows of `width` elements."""

    rows: int
    width: int
    element_bytes: float

    @property
    def bytes(self) -> float:
        """Size of the input."""
        return self.rows * self.width * self.element_bytes


def norm_forward_seconds(shape: NormShape, *, rates: Throughput) -> float:
    """Return the seconds of a layer norm or an RMS norm.

        seconds = launch + 2 · bytes ÷ (bandwidth · share) + rows · row time ÷ multiprocessors

    Each row has a thread block, which reads the row, waits for its statistics and writes it. Leaves
    out that an RMS norm reaches more of the bandwidth than a layer norm.
    """
    moved = memory_seconds(2 * shape.bytes, rates=rates, access=rates.norm.forward)
    return moved + shape.rows * rates.norm.row_seconds / rates.multiprocessors


def norm_input_gradient_seconds(shape: NormShape, *, rates: Throughput) -> float:
    """Return the seconds of the input's gradient: reads x and dy, writes dx."""
    return memory_seconds(3 * shape.bytes, rates=rates, access=rates.norm.backward)


def norm_weight_gradient_seconds(shape: NormShape, *, rates: Throughput) -> float:
    """Return the seconds of the gradients of weight and bias; their kernel reads x and dy again.

        seconds = launch + max(2 · bytes ÷ (bandwidth · share), rows · time of a row)

    A thread block takes 32 columns of all rows, one row after another, so a narrow norm keeps few
    multiprocessors busy. With more than 65,536 rows, and fewer blocks than half of the
    multiprocessors, the kernel also splits the rows.
    """
    moved = memory_seconds(2 * shape.bytes, rates=rates, access=rates.norm.backward)
    divides = shape.rows > _MANY_ROWS and shape.width / _COLUMNS < rates.multiprocessors / 2
    if divides:
        return moved
    return max(moved, rates.launch_seconds + shape.rows * rates.norm.column_seconds)


def fused_norm_seconds(shape: NormShape, *, rates: Throughput) -> tuple[float, float]:
    """Return the forward and backward seconds of a norm whose kernels reach the full bandwidth.

    Apex and Megatron have such kernels. The backward has two: one moves 3 tensors for the input's
    gradient, the other 2 for the gradients of weight and bias.
    """
    forward, own, learned = (memory_seconds(n * shape.bytes, rates=rates) for n in (2, 3, 2))
    return forward, own + learned


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormShape:
    """The input of a batch norm: `images` · `channels` planes of `plane` elements."""

    images: int
    channels: int
    plane: int
    element_bytes: float
    is_native: bool  # PyTorch's own kernels; otherwise cuDNN's
    by_pixels: bool = False  # channels_last

    @property
    def bytes(self) -> float:
        """Size of the input."""
        return self.images * self.channels * self.plane * self.element_bytes


def batch_norm_forward_seconds(shape: BatchNormShape, *, rates: Throughput) -> float:
    """Return the seconds of a batch norm on a GPU: a pass for statistics, one that normalizes.

        statistics = images · max(plane · time of an element, time of a plane)
                     · max(1, channels ÷ (blocks of a multiprocessor · multiprocessors))

    In NCHW a thread block takes the statistics of one channel of all images, so few channels keep
    few multiprocessors busy. In channels_last both passes reach the bandwidth of the backward.
    """
    facts = _facts(shape, rates)
    if shape.by_pixels:
        return memory_seconds(3 * shape.bytes, rates=rates, access=facts.backward)
    applied = memory_seconds(2 * shape.bytes, rates=rates, access=facts.apply)
    read = memory_seconds(shape.bytes, rates=rates)
    return applied + max(read, _by_planes(shape, facts.statistics, rates))


def batch_norm_backward_seconds(shape: BatchNormShape, *, rates: Throughput) -> float:
    """Return the seconds of all gradients: reads x and dy twice, writes dx.

    In NCHW few channels keep few multiprocessors busy, as in the forward.
    """
    facts = _facts(shape, rates)
    moved = memory_seconds(5 * shape.bytes, rates=rates, access=facts.backward)
    if shape.by_pixels:
        return moved
    return max(moved, _by_planes(shape, facts.gradient, rates))


def _facts(shape: BatchNormShape, rates: Throughput) -> BatchNormConstants:
    return rates.native_batch_norm if shape.is_native else rates.library_batch_norm


def _by_planes(shape: BatchNormShape, element_seconds: float, rates: Throughput) -> float:
    plane = max(shape.plane * element_seconds, _facts(shape, rates).plane)
    at_once = rates.norm.plane_blocks * rates.multiprocessors
    return rates.launch_seconds + shape.images * plane * max(1.0, shape.channels / at_once)
