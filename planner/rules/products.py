"""The work of ops that multiply: matrix products, recurrent cells, convolutions, linear algebra.

Linear algebra and Fourier transforms have textbook counts of FLOPs. Source: Golub and Van Loan,
Matrix Computations, for an m × n matrix with n ≤ m. Backwards count the products and solves of
their formulas (torch/csrc/autograd/FunctionsManual.cpp). Complex numbers count as real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2, prod

from autopar.planner.rules.rule import (
    Computation,
    Computing,
    MatrixProducts,
    OpSizes,
)
from autopar.planner.rules.signature import with_arguments


@with_arguments
def recurrent(sizes: OpSizes, gates: int, *, kept: int, unfused: int) -> Computation:
    """The layers of an LSTM (4 gates), a GRU (3) or a plain RNN (1), in one or both directions.

    For B rows of T steps and H hidden units, a layer multiplies all rows by its input weights at
    once (T·B × in by in × gates·H). Then, one step after the other, it multiplies the state by its
    hidden weights (T times B × H by H × gates·H), and by its projection if it has one. `kept`
    elements per row and hidden unit are saved for the backward; `unfused` is the number of kernels
    that a CPU runs in each step beside the products.
    """
    source, rows, steps = _sequence(sizes)
    ways = 2 if sizes.op.given("bidirectional") else 1
    weights = sizes.op.tensors("params")
    each = len(weights) // (sizes.op.number("num_layers") * ways)
    products: list[MatrixProducts] = []
    for at in range(0, len(weights), each):
        left = source if at < each * ways else ""
        own = weights[at : at + each]
        products += _layer(sizes, left, own, rows=rows, steps=max(1, steps))
    widths = [sizes.shape(name)[0] // gates for name in weights[::each]]
    return Computation(
        products=tuple(products),
        steps=steps * len(widths),
        unfused=unfused,
        kept=kept * rows * sum(widths),
    )


def _sequence(sizes: OpSizes) -> tuple[str, int, int]:
    """Return the input, its rows (of all steps), and the steps: one for each of `batch_sizes`.

    An input that is not packed has no `batch_sizes`, but a dim for the steps.
    """
    packed = sizes.op.tensors("data")
    if packed:
        return packed[0], sizes.shape(packed[0])[0], sizes.shape(sizes.op.tensor("batch_sizes"))[0]
    source = sizes.op.tensor("input")
    shape = sizes.shape(source)
    steps = shape[1 if sizes.op.given("batch_first") else 0] if len(shape) > 2 else shape[0]
    return source, prod(shape[:-1]), steps


def _layer(
    sizes: OpSizes, source: str, weights: tuple[str, ...], *, rows: int, steps: int
) -> Iterator[MatrixProducts]:
    """Yield a layer's products.

    The first state is multiplied separately: it is the input `hx`, which may need no gradient.
    """
    of_input, of_state, *more = weights
    together = rows // steps
    (wide, inputs), (_, states) = sizes.shape(of_input), sizes.shape(of_state)
    yield MatrixProducts(left=source, right=of_input, batch=1, m=rows, n=wide, k=inputs)
    for left, times in ((sizes.op.tensor("hx"), 1), ("", steps - 1)):
        yield MatrixProducts(
            left=left, right=of_state, batch=1, m=together, n=wide, k=states, times=times
        )
    if len(more) % 2:  # a projection follows the biases
        out, hidden = sizes.shape(more[-1])
        yield MatrixProducts(
            left="", right=more[-1], batch=1, m=together, n=out, k=hidden, times=steps
        )


@with_arguments
def cell(sizes: OpSizes, gates: int, *, kept: int) -> Computation:
    """The products of one step of one layer: input and state, each times its weights."""
    products = []
    for source, weight in (("input", "w_ih"), ("hx", "w_hh")):
        left, right = sizes.op.tensor(source), sizes.op.tensor(weight)
        n, k = sizes.shape(right)
        rows = prod(sizes.shape(left)[:-1])
        products.append(MatrixProducts(left=left, right=right, batch=1, m=rows, n=n, k=k))
    hidden = sizes.shape(sizes.op.tensor("w_hh"))[0] // gates
    rows = products[0].m
    return Computation(products=tuple(products), steps=1, kept=kept * rows * hidden)


def convolution(sizes: OpSizes) -> Computation:
    """A convolution with any number of dims; its FLOPs are as from the letters of rules/table.py.

    Each element of the result is a sum over the weights of its output channel. If the convolution
    is transposed, each element of the input is spread over the weights of its input channel.
    """
    source, weight = sizes.op.tensor("input", "self"), sizes.op.tensor("weight")
    spread = "transpose" in sizes.op.target or bool(sizes.op.given("transposed"))
    rows = prod(sizes.shape(source if spread else sizes.op.outputs[0]))
    channels, *rest = sizes.shape(weight)
    if sizes.op.target == "aten.conv_tbc.default":  # taps, input channels, output channels
        channels, rest = rest[-1], [channels, rest[0]]
    product = MatrixProducts(
        left=source, right=weight, batch=1, m=rows // channels, n=channels, k=prod(rest)
    )
    return Computation(products=(product,))


@with_arguments
def matrices(sizes: OpSizes, left: str, right: str) -> Computation:
    """A product … m k by … k n of two arguments; either of them may be a vector."""
    first, second = sizes.op.tensor(left), sizes.op.tensor(right)
    a, b = sizes.shape(first), sizes.shape(second)
    a = a if len(a) > 1 else (1, *a)
    b = b if len(b) > 1 else (*b, 1)
    lead = max((a[:-2], b[:-2]), key=prod)
    product = MatrixProducts(left=first, right=second, batch=prod(lead), m=a[-2], n=b[-1], k=a[-1])
    return Computation(products=(product,))


@with_arguments
def grouped(sizes: OpSizes, left: str, right: str) -> Computation:
    """Products in which each matrix, or each group of rows, has its own matrix as a factor."""
    first, second = sizes.op.tensor(left), sizes.op.tensor(right)
    a, b = sizes.shape(first), sizes.shape(second)
    batch = a[0] if len(a) == len(b) == 3 else 1
    product = MatrixProducts(left=first, right=second, batch=batch, m=a[-2], n=b[-1], k=a[-1])
    return Computation(products=(product,))


@with_arguments
def rows_by_rows(sizes: OpSizes, left: str, right: str) -> Computation:
    """Distances or inner products of each row of one tensor with each row of another."""
    first, second = sizes.op.tensor(left), sizes.op.tensor(right)
    a, k = sizes.shape(first), sizes.shape(first)[-1] if sizes.shape(first) else 1
    out = prod(sizes.shape(sizes.op.outputs[0]))
    m = a[-2] if len(a) > 1 else 1
    n = sizes.shape(second)[-2] if len(sizes.shape(second)) > 1 else 1
    batch = max(1, out // max(1, m * n))
    product = MatrixProducts(left=first, right=second, batch=batch, m=m, n=n, k=k)
    return Computation(products=(product,))


def summed_products(sizes: OpSizes) -> Computation:
    """Products b m k by b k n, summed over b."""
    left, right = sizes.op.tensor("batch1"), sizes.op.tensor("batch2")
    (b, m, k), n = sizes.shape(left), sizes.shape(right)[-1]
    return Computation(
        products=(MatrixProducts(left=left, right=right, batch=1, m=m, n=n, k=b * k),)
    )


def over_dims(sizes: OpSizes) -> Computation:
    """A tensordot, which sums over the listed dims of both tensors."""
    left, right = sizes.op.tensor("self"), sizes.op.tensor("other")
    a, b, dims = sizes.shape(left), sizes.shape(right), sizes.op.given("dims_self")
    k = prod(a[d] for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else 1
    product = MatrixProducts(left=left, right=right, batch=1, m=prod(a) // k, n=prod(b) // k, k=k)
    return Computation(products=(product,))


def chain(sizes: OpSizes) -> Computation:
    """A product of several matrices in the order with the fewest FLOPs, as torch chooses it."""
    names = sizes.op.tensors("matrices", "tensors")
    shapes = [sizes.shape(name) for name in names]
    rows = [shape[0] if i or len(shape) > 1 else 1 for i, shape in enumerate(shapes)]
    edges = [*rows, shapes[-1][1] if len(shapes[-1]) > 1 else 1]
    return Computation(products=tuple(_cheapest(names, edges)))


def _cheapest(names: tuple[str, ...], edges: list[int]) -> tuple[MatrixProducts, ...]:
    """Return the products in the order with the fewest FLOPs; intermediate results have no name."""
    count = len(names)
    best: dict[tuple[int, int], tuple[MatrixProducts, ...]] = {(i, i): () for i in range(count)}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            ways = (
                (*best[i, k], *best[k + 1, j], MatrixProducts(
                    left=names[i] if k == i else "", right=names[j] if k + 1 == j else "",
                    batch=1, m=edges[i], n=edges[j + 1], k=edges[k + 1],
                ))
                for k in range(i, j)
            )  # fmt: skip
            best[i, j] = min(ways, key=lambda way: sum(one.flops for one in way))
    return best[0, count - 1]


def bilinear(sizes: OpSizes) -> Computation:
    """The products … i by o i j by … j: all weights times the first input, then the second."""
    left, right, weight = (sizes.op.tensor(name) for name in ("input1", "input2", "weight"))
    rows, (o, i, j) = prod(sizes.shape(left)[:-1]), sizes.shape(weight)
    first = MatrixProducts(left=left, right=weight, batch=1, m=rows, n=o * j, k=i)
    return Computation(products=(
        first, MatrixProducts(left="", right=right, batch=rows, m=o, n=1, k=j),
    ))  # fmt: skip


def bags(sizes: OpSizes) -> Computation:
    """The FLOPs of bags whose rows have weights: each row times its weight is added to its bag."""
    rows = sum(prod(sizes.shape(name)) for name in sizes.op.tensors("per_sample_weights"))
    flops = 2 * rows * sizes.shape(sizes.op.tensor("weight"))[1]
    return Computation(flops=flops, backward_flops=flops)


def attention(sizes: OpSizes) -> Computation:
    """Scores of queries and keys, and sums of values: 2 products forward, 5 backward.

    Used for kernels that a model calls directly, and if scaled_dot_product_attention has other dims
    than in rules/table.py. In scaled_dot_product ops, the heads' dim comes before that of positions
    in the sequence; in others, after it.
    """
    query, key, value = (
        sizes.shape(sizes.op.tensor(*names)) for names in (("query",), ("key", "k"), ("value", "v"))
    )
    at = -2 if "scaled_dot_product" in sizes.op.target else -3
    heads = -3 if at == -2 else -2
    each = prod(query[:-3]) * query[heads] * query[at] * key[at]
    flops = 2 * each * (query[-1] + value[-1])
    return Computation(flops=flops, backward_flops=5 * flops // 2)


def power(sizes: OpSizes) -> Computation:
    """An integer power of a matrix, by repeated squaring.

    Each bit of the exponent costs a square, except the first. Each bit that is set costs a product,
    too, except one.
    """
    source = sizes.op.tensor("self")
    *lead, n, _ = sizes.shape(source)
    exponent = abs(sizes.op.number("n", 1))
    times = max(0, exponent.bit_length() - 1 + exponent.bit_count() - 1)
    flops = 2 * prod(lead) * n**3 * times
    return Computation(flops=flops, backward_flops=2 * flops)


_PANEL = 32  # columns of a block in LAPACK's algorithms


@with_arguments
def factored(
    sizes: OpSizes, forward: Callable[[int, int], float], backward: Callable[[int, int], float]
) -> Computation:
    """A factorisation in blocks; `forward` and `backward` give its FLOPs.

    Their arguments are the larger and the smaller size of a matrix.
    """
    *lead, rows, columns = sizes.shape(sizes.op.inputs[0])
    m, n, batch = max(rows, columns), min(rows, columns), prod(lead)
    return Computation(
        flops=round(batch * forward(m, n)),
        backward_flops=round(batch * backward(m, n)),
        steps=-(-n // _PANEL),
    )


def cubic(forward: float, backward: float) -> Computing:
    """A factorisation of a square matrix that takes a multiple of n³ FLOPs."""
    return factored(lambda _, n: forward * n**3, lambda _, n: backward * n**3)


@with_arguments
def solved(sizes: OpSizes, factor: float, *, by: str, matrix: str) -> Computation:
    """A factorisation of the argument `matrix`, and solves for the columns of the argument `by`.

    Factoring takes `factor`·n³ FLOPs, and each column 2·n², or n² if the matrix is triangular. The
    backward solves once more, and multiplies.
    """
    *lead, n, _ = sizes.shape(sizes.op.tensor(matrix))
    side = sizes.shape(sizes.op.tensor(by))
    columns = max(1, prod(side) // max(1, prod(lead) * n))
    triangles = 1 if "triangular" in sizes.op.target else 2
    once = triangles * n * n * columns * prod(lead)
    return Computation(
        flops=round(factor * n**3 * prod(lead)) + once,
        backward_flops=once + 2 * n * n * columns * prod(lead),
        steps=-(-n // _PANEL),
    )


@with_arguments
def folded(sizes: OpSizes, forward: float, backward: float) -> Computation:
    """A multiple of n³ FLOPs for a tensor whose dims flatten to an n × n matrix."""
    n = round(prod(sizes.shape(sizes.op.inputs[0])) ** 0.5)
    return Computation(flops=round(forward * n**3), backward_flops=round(backward * n**3))


def fourier(sizes: OpSizes) -> Computation:
    """5·N·log₂ N FLOPs for each transform of N numbers; half of that if one side is real."""
    op = sizes.op
    source, result = sizes.shape(op.inputs[0]), sizes.shape(op.outputs[0])
    larger = max((source, result), key=prod)
    size = prod(larger[dim] for dim in _transformed(sizes, len(larger)))
    is_real = any(word in op.target for word in ("rfft", "hfft", "stft", "_r2c", "_c2r"))
    flops = round(5 * prod(larger) * log2(max(2, size)) * (0.5 if is_real else 1))
    return Computation(flops=flops, backward_flops=flops)


def _transformed(sizes: OpSizes, rank: int) -> tuple[int, ...]:
    for name in ("dim", "dims"):
        value = sizes.op.given(name)
        if isinstance(value, tuple):
            return tuple(item for item in value if isinstance(item, int))
        if isinstance(value, int):
            return (value,)
    if "fft2" in sizes.op.target:
        return (-2, -1)
    return tuple(range(rank)) if "fftn" in sizes.op.target else (-1,)


def short_time_fourier(sizes: OpSizes) -> Computation:
    """A real transform of each window: `n_fft` numbers for each column of the spectrum."""
    spectrum = max(map(sizes.shape, (*sizes.op.inputs, *sizes.op.outputs)), key=len)
    size = sizes.op.given("n_fft")
    wide = size if isinstance(size, int) else 2
    windows = prod(spectrum) // (wide // 2 + 1)
    flops = round(2.5 * windows * wide * log2(max(2, wide)))
    return Computation(flops=flops, backward_flops=flops)


def connectionist(sizes: OpSizes) -> Computation:
    """CTC: in each row and step, 6 FLOPs for the three transitions into each of 2·S + 1 states."""
    steps, *_ = sizes.shape(sizes.op.tensor("log_probs"))
    targets = sizes.shape(sizes.op.tensors("targets")[0])
    rows = sizes.shape(sizes.op.tensor("log_probs"))[1] if len(targets) > 1 else 1
    flops = 6 * steps * rows * (2 * targets[-1] + 1)
    return Computation(flops=flops, backward_flops=flops)
