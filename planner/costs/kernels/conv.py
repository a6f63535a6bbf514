"""Turns the shape of a convolution into seconds: an implicit matrix product."""

from dataclasses import dataclass
from math import prod

from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.kernels.elementwise import memory_seconds
from autopar.planner.costs.kernels.gemm import gemm_seconds

TENSOR_CORE_CHANNELS = 8  # per group: fewer and tensor cores have nothing to contract over


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
        """Bytes of the input."""
        return self.batch * self.in_channels * prod(self.input_size) * self.element_bytes

    @property
    def output_bytes(self) -> float:
        """Bytes of the output."""
        return self.batch * self.out_channels * prod(self.output_size) * self.element_bytes

    @property
    def rows(self) -> int:
        """Output positions: the rows of the product."""
        return self.batch * prod(self.output_size)

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return prod(self.kernel_size)


def convolution_forward_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds of a convolution in channels-last layout.

    Per group, output positions × (in channels · taps) by (in channels · taps) × out channels, where
    the input is read once however often its windows overlap: the greater of the product's compute
    and the true traffic. Source: implicit GEMM of cuDNN. Leaves out Winograd and FFT kernels, and
    idle taps at the borders. With fewer than eight channels per group (depthwise) the kernel is
    bound by bytes, at the bandwidth of a gather.
    """
    inputs, outputs = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    return _product_seconds(
        shape, rows=shape.rows, columns=outputs, depth=inputs * shape.taps, rates=rates
    )


def convolution_input_gradient_seconds(shape: ConvolutionShape, *, rates: Throughput) -> float:
    """Return the seconds of the input's gradient: the transposed convolution.

    Input positions × (out channels · taps ÷ stride) by … × in channels, the stride being the ratio
    of the sizes.
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
    """Return the seconds that channels-first adds: input and output are each rewritten once.

    Tensor-core kernels read channels-last, so cuDNN transposes before and after; once more for each
    of the gradients.
    """
    return memory_seconds(2 * shape.input_bytes, rates=rates) + memory_seconds(
        2 * shape.output_bytes, rates=rates
    )


def _product_seconds(
    shape: ConvolutionShape, *, rows: int, columns: int, depth: int, rates: Throughput
) -> float:
    """Return the greater of the product without its traffic and the traffic of both tensors."""
    moved = shape.input_bytes + shape.output_bytes
    if shape.groups > 1 and shape.in_channels // shape.groups < TENSOR_CORE_CHANNELS:
        return memory_seconds(moved, rates=rates, access=rates.access.gather)
    product = gemm_seconds(
        rows, columns, depth, rates=rates, batch=shape.groups, element_bytes=0, stored_bytes=0
    )
    return max(product, memory_seconds(moved, rates=rates))
