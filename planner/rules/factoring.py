"""Turns sizes into the FLOPs of linear algebra and Fourier transforms: textbook counts.

Source: Golub and Van Loan, Matrix Computations, for an m × n matrix with n ≤ m; backwards by the
products and solves in their formulas (torch/csrc/autograd/FunctionsManual.cpp). Complex numbers
count as real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

from autopar.planner.rules.computation import Computation, Computing, Sizes, given, tensor, tensors

_PANEL = 32  # columns that LAPACK's blocked algorithms finish before they go on


def factored(
    forward: Callable[[int, int], float], backward: Callable[[int, int], float]
) -> Computing:
    """FLOPs by the larger and the smaller extent of each matrix, panel after panel."""

    def computation(sizes: Sizes) -> Computation:
        *lead, rows, columns = sizes.shape(sizes.op.inputs[0])
        m, n, batch = max(rows, columns), min(rows, columns), prod(lead)
        return Computation(
            flops=round(batch * forward(m, n)),
            backward_flops=round(batch * backward(m, n)),
            steps=-(-n // _PANEL),
        )

    return computation


def cubic(forward: float, backward: float) -> Computing:
    """So many n³ of a square matrix."""
    return factored(lambda _, n: forward * n**3, lambda _, n: backward * n**3)


def solved(factor: float, *, by: tuple[str, ...], matrix: tuple[str, ...]) -> Computing:
    """`factor`·n³ to factor the matrix, n² twice for each column of the right side; a single solve
    with a triangle takes half of that. The backward solves once more, and multiplies."""

    def computation(sizes: Sizes) -> Computation:
        *lead, n, _ = sizes.shape(tensor(sizes, *matrix))
        side = sizes.shape(tensor(sizes, *by))
        columns = max(1, prod(side) // max(1, prod(lead) * n))
        triangles = 1 if "triangular" in sizes.op.target else 2
        once = triangles * n * n * columns * prod(lead)
        return Computation(
            flops=round(factor * n**3 * prod(lead)) + once,
            backward_flops=once + 2 * n * n * columns * prod(lead),
            steps=-(-n // _PANEL),
        )

    return computation


def folded(forward: float, backward: float) -> Computing:
    """A tensor that is a square matrix once its dims are joined."""

    def computation(sizes: Sizes) -> Computation:
        n = round(prod(sizes.shape(sizes.op.inputs[0])) ** 0.5)
        return Computation(flops=round(forward * n**3), backward_flops=round(backward * n**3))

    return computation


def fourier(sizes: Sizes) -> Computation:
    """5·N·log₂ N for each transform of N numbers, half of it where one side is real."""
    op = sizes.op
    source, result = sizes.shape(op.inputs[0]), sizes.shape(op.outputs[0])
    larger = max((source, result), key=prod)
    size = prod(larger[dim] for dim in _transformed(sizes, len(larger)))
    is_real = any(word in op.target for word in ("rfft", "hfft", "stft", "_r2c", "_c2r"))
    flops = round(5 * prod(larger) * log2(max(2, size)) * (0.5 if is_real else 1))
    return Computation(flops=flops, backward_flops=flops)


def _transformed(sizes: Sizes, rank: int) -> tuple[int, ...]:
    for name in ("dim", "dims"):
        value = given(sizes, name)
        if isinstance(value, tuple):
            return tuple(item for item in value if isinstance(item, int))
        if isinstance(value, int):
            return (value,)
    if "fft2" in sizes.op.target:
        return (-2, -1)
    return tuple(range(rank)) if "fftn" in sizes.op.target else (-1,)


def short_time_fourier(sizes: Sizes) -> Computation:
    """A real transform of each window: `n_fft` numbers for each column of the spectrum."""
    spectrum = max(map(sizes.shape, (*sizes.op.inputs, *sizes.op.outputs)), key=len)
    size = given(sizes, "n_fft")
    wide = size if isinstance(size, int) else 2
    windows = prod(spectrum) // (wide // 2 + 1)
    flops = round(2.5 * windows * wide * log2(max(2, wide)))
    return Computation(flops=flops, backward_flops=flops)


def connectionist(sizes: Sizes) -> Computation:
    """CTC: for each row and step, sums of three ways into each of 2·S + 1 states, twice."""
    steps, *_ = sizes.shape(tensor(sizes, "log_probs"))
    targets = sizes.shape(tensors(sizes, "targets")[0])
    rows = sizes.shape(tensor(sizes, "log_probs"))[1] if len(targets) > 1 else 1
    flops = 6 * steps * rows * (2 * targets[-1] + 1)
    return Computation(flops=flops, backward_flops=flops)
