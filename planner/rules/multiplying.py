"""Turns sizes into the products of ops that multiply: recurrent cells, convolutions, chains."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autopar.planner.rules.computation import (
    Computation,
    Computing,
    Product,
    Sizes,
    given,
    number,
    tensor,
    tensors,
)


def recurrent(gates: int, *, kept: int, unfused: int) -> Computing:
    """The layers of an LSTM (4 gates), a GRU (3) or a plain RNN (1), in both directions.

    A layer multiplies all rows by its input weights at once, then each step's state by its hidden
    weights (and by its projection), one step after the other: T·B × in by in × gates·H, and T times
    B × H by H × gates·H. `kept` elements of each row and hidden unit are kept for the backward,
    `unfused` kernels are what a step takes beside its products on a CPU.
    """

    def computation(sizes: Sizes) -> Computation:
        source, rows, steps = _sequence(sizes)
        ways = 2 if given(sizes, "bidirectional") else 1
        weights = tensors(sizes, "params")
        each = len(weights) // (number(sizes, "num_layers") * ways)
        products: list[Product] = []
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

    return computation


def _sequence(sizes: Sizes) -> tuple[str, int, int]:
    """Return the input with its rows and steps; one that is packed has the sizes of its steps."""
    packed = tensors(sizes, "data")
    if packed:
        return packed[0], sizes.shape(packed[0])[0], sizes.shape(tensor(sizes, "batch_sizes"))[0]
    source = tensor(sizes, "input")
    shape = sizes.shape(source)
    steps = shape[1 if given(sizes, "batch_first") else 0] if len(shape) > 2 else shape[0]
    return source, prod(shape[:-1]), steps


def _layer(
    sizes: Sizes, source: str, weights: tuple[str, ...], *, rows: int, steps: int
) -> Iterator[Product]:
    """Of the states of a layer only the first is given, and may need no gradient."""
    of_input, of_state, *more = weights
    together = rows // steps
    (wide, inputs), (_, states) = sizes.shape(of_input), sizes.shape(of_state)
    yield Product(left=source, right=of_input, batch=1, m=rows, n=wide, k=inputs)
    for left, times in ((tensor(sizes, "hx"), 1), ("", steps - 1)):
        yield Product(left=left, right=of_state, batch=1, m=together, n=wide, k=states, times=times)
    if len(more) % 2:  # a projection stands behind the biases
        out, hidden = sizes.shape(more[-1])
        yield Product(left="", right=more[-1], batch=1, m=together, n=out, k=hidden, times=steps)


def cell(gates: int, *, kept: int) -> Computing:
    """One step of one layer: input and state by their weights."""

    def computation(sizes: Sizes) -> Computation:
        products = []
        for source, weight in (("input", "w_ih"), ("hx", "w_hh")):
            left, right = tensor(sizes, source), tensor(sizes, weight)
            n, k = sizes.shape(right)
            rows = prod(sizes.shape(left)[:-1])
            products.append(Product(left=left, right=right, batch=1, m=rows, n=n, k=k))
        hidden = sizes.shape(tensor(sizes, "w_hh"))[0] // gates
        rows = products[0].m
        return Computation(products=tuple(products), steps=1, kept=kept * rows * hidden)

    return computation


def convolution(sizes: Sizes) -> Computation:
    """Each result is a sum over the weights of one output channel; transposed, each input of one
    input channel is spread over the weights. Says the same as the letters do, for any dims.
    """
    source, weight = tensor(sizes, "input", "self"), tensor(sizes, "weight")
    spread = "transpose" in sizes.op.target or bool(given(sizes, "transposed"))
    rows = prod(sizes.shape(source if spread else sizes.op.outputs[0]))
    channels, *rest = sizes.shape(weight)
    if sizes.op.target == "aten.conv_tbc.default":  # taps, input channels, output channels
        channels, rest = rest[-1], [channels, rest[0]]
    product = Product(
        left=source, right=weight, batch=1, m=rows // channels, n=channels, k=prod(rest)
    )
    return Computation(products=(product,))


def matrices(left: str, right: str) -> Computing:
    """… m k by … k n of two arguments, either of which may be a vector."""

    def computation(sizes: Sizes) -> Computation:
        first, second = tensor(sizes, left), tensor(sizes, right)
        a, b = sizes.shape(first), sizes.shape(second)
        a = a if len(a) > 1 else (1, *a)
        b = b if len(b) > 1 else (*b, 1)
        lead = max((a[:-2], b[:-2]), key=prod)
        product = Product(left=first, right=second, batch=prod(lead), m=a[-2], n=b[-1], k=a[-1])
        return Computation(products=(product,))

    return computation


def grouped(left: str, right: str) -> Computing:
    """Matrices or groups of rows by matrices: each row meets one matrix, each column one group."""

    def computation(sizes: Sizes) -> Computation:
        first, second = tensor(sizes, left), tensor(sizes, right)
        a, b = sizes.shape(first), sizes.shape(second)
        batch = a[0] if len(a) == len(b) == 3 else 1
        product = Product(left=first, right=second, batch=batch, m=a[-2], n=b[-1], k=a[-1])
        return Computation(products=(product,))

    return computation


def rows_by_rows(left: str, right: str) -> Computing:
    """… p m and … r m: each row of one with each of the other (distances, inner products)."""

    def computation(sizes: Sizes) -> Computation:
        first, second = tensor(sizes, left), tensor(sizes, right)
        a, k = sizes.shape(first), sizes.shape(first)[-1] if sizes.shape(first) else 1
        out = prod(sizes.shape(sizes.op.outputs[0]))
        m = a[-2] if len(a) > 1 else 1
        n = (*sizes.shape(second), 1)[-3] if len(sizes.shape(second)) > 1 else 1
        batch = max(1, out // max(1, m * n))
        product = Product(left=first, right=second, batch=batch, m=m, n=n, k=k)
        return Computation(products=(product,))

    return computation


def summed_products(sizes: Sizes) -> Computation:
    """b m k by b k n, summed over b as well."""
    left, right = tensor(sizes, "batch1"), tensor(sizes, "batch2")
    (b, m, k), n = sizes.shape(left), sizes.shape(right)[-1]
    return Computation(products=(Product(left=left, right=right, batch=1, m=m, n=n, k=b * k),))


def over_dims(sizes: Sizes) -> Computation:
    """A tensordot: what is summed are the listed dims of both."""
    left, right = tensor(sizes, "self"), tensor(sizes, "other")
    a, b, dims = sizes.shape(left), sizes.shape(right), given(sizes, "dims_self")
    k = prod(a[d] for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else 1
    product = Product(left=left, right=right, batch=1, m=prod(a) // k, n=prod(b) // k, k=k)
    return Computation(products=(product,))


def chain(sizes: Sizes) -> Computation:
    """A product of several matrices, in the order that takes the fewest FLOPs, as torch's does."""
    names = tensors(sizes, "matrices") or tensors(sizes, "tensors")
    shapes = [sizes.shape(name) for name in names]
    rows = [shape[0] if i or len(shape) > 1 else 1 for i, shape in enumerate(shapes)]
    edges = [*rows, shapes[-1][1] if len(shapes[-1]) > 1 else 1]
    return Computation(products=tuple(_cheapest(names, edges)))


def _cheapest(names: tuple[str, ...], edges: list[int]) -> tuple[Product, ...]:
    """Return the products of the best bracketing; what is a product already has no name."""
    count = len(names)
    best: dict[tuple[int, int], tuple[Product, ...]] = {(i, i): () for i in range(count)}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            ways = (
                (*best[i, k], *best[k + 1, j], Product(
                    left=names[i] if k == i else "", right=names[j] if k + 1 == j else "",
                    batch=1, m=edges[i], n=edges[j + 1], k=edges[k + 1],
                ))
                for k in range(i, j)
            )  # fmt: skip
            best[i, j] = min(ways, key=lambda way: sum(one.flops for one in way))
    return best[0, count - 1]


def bilinear(sizes: Sizes) -> Computation:
    """… i by o i j by … j: the first input by all weights, then by the second, for each result."""
    left, right, weight = (tensor(sizes, name) for name in ("input1", "input2", "weight"))
    rows, (o, i, j) = prod(sizes.shape(left)[:-1]), sizes.shape(weight)
    first = Product(left=left, right=weight, batch=1, m=rows, n=o * j, k=i)
    return Computation(products=(
        first, Product(left="", right=right, batch=rows, m=o, n=1, k=j),
    ))  # fmt: skip


def bags(sizes: Sizes) -> Computation:
    """Each row that is looked up is added to its bag, times its weight where it has one."""
    rows = sum(prod(sizes.shape(name)) for name in tensors(sizes, "per_sample_weights"))
    flops = 2 * rows * sizes.shape(tensor(sizes, "weight"))[1]
    return Computation(flops=flops, backward_flops=flops)


def attention(sizes: Sizes) -> Computation:
    """Scores of each query and key, and sums of values; the backward computes 5 products for 2.

    Of the kernels that a model calls by their own names: heads before rows in those of
    scaled_dot_product_attention, behind them in the others.
    """
    query, key, value = (
        sizes.shape(tensor(sizes, *names)) for names in (("query",), ("key", "k"), ("value", "v"))
    )
    at = -2 if "scaled_dot_product" in sizes.op.target else -3
    heads = -3 if at == -2 else -2
    each = prod(query[:-3]) * query[heads] * query[at] * key[at]
    flops = 2 * each * (query[-1] + value[-1])
    return Computation(flops=flops, backward_flops=5 * flops // 2)


def power(sizes: Sizes) -> Computation:
    """A matrix to a whole power: squared for each bit of it, and once more for each that is set."""
    source = tensor(sizes, "self")
    *lead, n, _ = sizes.shape(source)
    exponent = abs(number(sizes, "n", 1))
    times = max(0, exponent.bit_length() - 1 + exponent.bit_count() - 1)
    flops = 2 * prod(lead) * n**3 * times
    return Computation(flops=flops, backward_flops=2 * flops)
