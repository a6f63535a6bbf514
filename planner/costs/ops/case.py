"""An op on one rank, as the formulas see it: local sizes, products, FLOPs, bytes.

A letter names a dim in the rule of an op, as m, n and k do in the rule of a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from autopar.planner.axes.infer import OpAxes
from autopar.planner.costs.kernels.rates import Rates, Throughput
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import OpLayout
from autopar.planner.graph.ops import Op, TensorOrigin, Value, refs
from autopar.planner.precision import Float8, Precision, item_bytes
from autopar.planner.rules.rule import Computation, MatrixProducts, OpKind, Rule, Traffic
from autopar.planner.rules.signature import (
    Concat,
    Dim,
    Dims,
    FlattenedDims,
    Leaf,
    Signature,
    leaves,
)
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSplit:
    """A split of an op along an axis; the dim of its letter is this axis, or contains it.

    Each rank has ⌈size ÷ degree⌉ positions of the axis.
    """

    letter: str
    axis: str
    degree: int


def split_of(layout: OpLayout, degree: int) -> OpSplit | None:
    """Return the split of an op in a layout over `degree` ranks; None if it is not split."""
    if not layout.letter or degree == 1:
        return None
    return OpSplit(letter=layout.letter, axis=layout.axis, degree=degree)


def local_size(dim: Dim, batch: int, *, axis: str = "", degree: int = 1) -> int:
    """Return the positions of a dim on one rank, with one of its axes split by the degree."""
    if isinstance(dim, Leaf):
        size = dim.size.at(batch)
        return -(-size // degree) if dim.name == axis else size
    if isinstance(dim, FlattenedDims):
        return prod(local_size(factor, batch, axis=axis, degree=degree) for factor in dim.factors)
    return sum(local_size(part, batch, axis=axis, degree=degree) for part in dim.parts)


class LocalShapes:
    """The sizes of one op's letters and tensors on one rank."""

    def __init__(
        self, op: Op, graph: Graph, axes: OpAxes, *, batch: int, split: OpSplit | None = None
    ) -> None:
        self.op = op
        self.graph = graph
        self.signature = axes.signature
        self.batch = batch
        self.split = split
        self.form = rule_of(op.target).form_along(axes.signature, split.letter) if split else None
        self._axes = axes
        self._divided = _split_alike(axes, split) if split else frozenset[str]()
        self._expected = _expected_letters(op, graph, axes.signature)
        self._dims = dict((*axes.signature.results[::-1], *axes.signature.operands[::-1]))

    def size(self, dim: Dim) -> int:
        """Return the local size of a dim of the signature."""
        if isinstance(dim, Leaf):
            return self._letter(dim)
        if isinstance(dim, FlattenedDims):
            return prod(map(self.size, dim.factors))
        return sum(map(self.size, dim.parts))

    def _letter(self, letter: Leaf) -> int:
        if self.split and letter.name in self._divided:
            meaning = self._axes.letters.get(letter.name, letter)
            axis, degree = self.split.axis, self.split.degree
            whole = local_size(meaning, self.batch, axis=axis, degree=degree)
        else:
            whole = letter.size.at(self.batch)
        share = self._expected.get(letter.name)
        return whole if share is None else max(1, round(whole * share))

    def letters(self, names: Iterable[str]) -> int:
        """Return the product of some letters' sizes, by their names in the rule.

        "*" is every letter, "…" those of the leading dims. If keys have fewer heads than queries,
        the heads h are k key heads with g query heads each.
        """
        wanted = set(names)
        if "h" in wanted and "k" in self.signature.letters:
            wanted |= {"k", "g"}
        if wanted == {"*"}:
            found = {x for _, dims in self.signature.operands for d in dims for x in leaves(d)}
            return prod(self.size(leaf) for leaf in found)
        return prod(
            self.size(dim)
            for name, dim in self.signature.letters.items()
            if name in wanted or (name.startswith("…") and "…" in wanted)
        )

    def dims(self, tensor: str) -> Dims | None:
        """Return the dims of an operand or result in letters, or None if the rule ignores it."""
        return self._dims.get(tensor)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the local shape of an operand or result."""
        dims = self._dims.get(tensor)
        if dims is None:
            return tuple(size.at(self.batch) for size in self.graph.tensors[tensor].shape)
        return tuple(map(self.size, dims))

    def numel(self, tensor: str) -> int:
        """Return the local number of elements of an operand or result."""
        return prod(self.shape(tensor))


def _expected_letters(op: Op, graph: Graph, signature: Signature) -> dict[str, float]:
    """Return the letters of dims that hold only the rows that a boolean mask selects.

    Each comes with the share of rows that the mask is expected to select. A letter is left out if
    one of the op's tensors has all rows in a dim of this letter.
    """
    tensors = graph.tensors
    if all(tensors[name].expected == 1.0 for name in (*op.inputs, *op.outputs)):
        return {}
    found: dict[str, float] = {}
    others: set[str] = set()
    for name, dims in (*signature.operands, *signature.results):
        tensor = tensors[name]
        mask = tensors.get(tensor.counted_by)
        for dim, size in zip(dims, tensor.shape, strict=True):
            letters = {leaf.name for leaf in leaves(dim)}
            if mask is not None and tensor.expected != 1.0 and size == mask.numel:
                found.update(dict.fromkeys(letters, tensor.expected))
            else:
                others |= letters
    return {letter: share for letter, share in found.items() if letter not in others}


def _split_alike(axes: OpAxes, split: OpSplit) -> frozenset[str]:
    """Return the split letter, and letters concatenated with it that contain the axis, too.

    The shard of a concatenation is the concatenation of the shards: q, k and v of one fused matrix
    are split alike.
    """
    named = {split.letter}
    for _, dims in (*axes.signature.operands, *axes.signature.results):
        for part in _concatenations(dims):
            names = {leaf.name for leaf in leaves(part)}
            if split.letter in names:
                named |= {
                    name
                    for name in names
                    if any(x.name == split.axis for x in leaves(axes.letters[name]))
                }
    return frozenset(named)


def _concatenations(dims: Iterable[Dim]) -> Iterator[Concat]:
    for dim in dims:
        if isinstance(dim, Concat):
            yield dim
        elif isinstance(dim, FlattenedDims):
            yield from _concatenations(dim.factors)


def products_of(op: Op, shapes: LocalShapes) -> Iterator[MatrixProducts]:
    """Yield the matrix products of a contraction on one rank, from left to right.

    Letters of both factors and the result are the batch. Letters of one factor and the result are m
    or n. Letters of both factors, but not of the result, are contracted. Letters of one factor
    alone (the number of groups) are ignored.
    """
    names = factors_of(op)
    if shapes.signature.whole:  # the rule does not fit: only the shapes are known
        yield _by_shapes(op, names, shapes)
        return
    operands = _letters_of(names, shapes)
    kept_to_end = _letters(shapes.dims(op.outputs[0]) or (), shapes)
    left_name, left = names[0], operands[0]
    for position, (name, right) in enumerate(zip(names[1:], operands[1:], strict=True), start=1):
        later = {key for one in operands[position + 1 :] for key in one} | set(kept_to_end)
        yield _product(left_name, left, name, right, later)
        left_name, left = "", {k: v for k, v in {**left, **right}.items() if k in later}


def factors_of(op: Op) -> tuple[str, ...]:
    """Return the tensors that a contraction multiplies (not a bias)."""
    given = dict(op.arguments)
    return tuple(name for key in rule_of(op.target).factors for name in refs(given.get(key)))


def _by_shapes(op: Op, names: tuple[str, ...], shapes: LocalShapes) -> MatrixProducts:
    """Return a plain matmul: k is the first factor's last dim, n the result's, m its other dims."""
    result = shapes.shape(op.outputs[0]) or (1,)
    return MatrixProducts(
        left=names[0],
        right=names[-1],
        batch=1,
        m=prod(result[:-1]),
        n=result[-1],
        k=(shapes.shape(names[0]) or (1,))[-1],
    )


def _product(
    left_name: str,
    left: Mapping[str, int],
    right_name: str,
    right: Mapping[str, int],
    later: Iterable[str],
) -> MatrixProducts:
    needed = set(later)
    return MatrixProducts(
        left=left_name,
        right=right_name,
        batch=prod(left[x] for x in left if x in right and x in needed),
        m=prod(left[x] for x in left if x not in right and x in needed),
        n=prod(right[x] for x in right if x not in left and x in needed),
        k=prod(left[x] for x in left if x in right and x not in needed),
    )


def _letters_of(names: tuple[str, ...], shapes: LocalShapes) -> list[dict[str, int]]:
    """Return each factor's letters with their sizes; a tensor may be a factor twice."""
    operands = list(shapes.signature.operands)
    found = []
    for name in names:
        position = next(i for i, (tensor, _) in enumerate(operands) if tensor == name)
        found.append(_letters(operands.pop(position)[1], shapes))
    return found


def _letters(dims: Iterable[Dim], shapes: LocalShapes) -> dict[str, int]:
    return {leaf.name: shapes.size(leaf) for dim in dims for leaf in leaves(dim)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSeconds:
    """The time of an op on the device; the weights' gradients may be computed later."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    def __add__(self, other: OpSeconds) -> OpSeconds:
        return OpSeconds(
            forward=self.forward + other.forward,
            input_gradient=self.input_gradient + other.input_gradient,
            weight_gradient=self.weight_gradient + other.weight_gradient,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """An op with everything that its formula needs."""

    op: Op
    graph: Graph
    rule: Rule
    shapes: LocalShapes
    rates: Rates
    precision: Precision
    # as in Megatron: products add weights' gradients to fp32 sums, norms reach the full bandwidth
    fuses_gradients: bool = False
    pads: bool = False  # compiled: operands of products are padded to sizes with fast kernels
    float8: Float8 = Float8.NONE  # how it scales the factors of its products
    casts_input: bool = False  # to float8; later products of the layer read the cast input

    @property
    def result(self) -> str:
        """The first result."""
        return self.op.outputs[0]

    @property
    def memory(self) -> Throughput:
        """The rates of kernels that move bytes."""
        return self.rates.own

    def factors(self, element_bytes: int) -> tuple[Throughput, int]:
        """Return the rates of products, and the bytes per element of their factors.

        The argument is the bytes per element of the result.
        """
        if self.float8 is Float8.NONE:
            return self.rates.of(element_bytes), element_bytes
        return self.rates.float8, 1

    def argument(self, name: str, default: Value = None) -> Value:
        """Return an argument by its schema name, or the default."""
        return dict(self.op.arguments).get(name, default)

    def element_bytes(self, tensor: str) -> int:
        """Return the bytes of one element of a tensor."""
        return item_bytes(self.graph.tensors[tensor].dtype, self.precision)

    def bytes(self, tensor: str) -> int:
        """Return the local bytes of a tensor."""
        return self.shapes.numel(tensor) * self.element_bytes(tensor)

    def needs_gradient(self, tensor: str) -> bool:
        """Whether a tensor needs a gradient."""
        return self.graph.tensors[tensor].requires_grad

    def is_weight(self, tensor: str) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        root = self.graph.tensors[tensor].storage
        return self.graph.tensors[root].origin is TensorOrigin.PARAMETER


def forward_flops(shapes: LocalShapes) -> int:
    """Return the FLOPs of an op's computation, or Σ 2·∏ sizes over the groups in `contracts`."""
    computation = computation_of(shapes)
    if computation is not None:
        return computation.forward_flops
    contracts = rule_of(shapes.op.target).contracts
    return sum(2 * shapes.letters(group.split()) for group in contracts)


def backward_flops(shapes: LocalShapes) -> int:
    """Return the FLOPs of the backward: one product for each factor that needs a gradient.

    Flash attention computes five products, for two in the forward. An op without a gradient (whole
    numbers, frozen weights) has no backward.
    """
    op, graph = shapes.op, shapes.graph
    if not graph.learns(op):
        return 0
    computation = computation_of(shapes)
    if computation is not None:
        return computation.backward_flops + sum(
            product.flops * _with_gradient((product.left, product.right), op, graph)
            for product in computation.products
        )
    if len(rule_of(op.target).contracts) > 1:
        return int(forward_flops(shapes) * 2.5)
    return forward_flops(shapes) * _with_gradient(factors_of(op), op, graph)


def computation_of(shapes: LocalShapes) -> Computation | None:
    """Return an op's computation if the rule's letters do not determine its FLOPs; else None.

    If a contraction's tensors do not have the dims of its rule, only their shapes are known.
    """
    rule = rule_of(shapes.op.target)
    if rule.contracts and not shapes.signature.is_opaque:
        return None
    if rule.computes is not None:
        return rule.computes(shapes)
    return Computation(products=tuple(products_of(shapes.op, shapes))) if rule.contracts else None


def _with_gradient(names: tuple[str, ...], op: Op, graph: Graph) -> int:
    """Count the factors that need a gradient; an intermediate product does if the result does."""
    return sum(graph.tensors[name or op.outputs[0]].requires_grad for name in names)


def moved_bytes(op: Op, graph: Graph, size: Callable[[str], int]) -> int:
    """Return the bytes that an op reads and writes; `size` gives the bytes of a tensor.

    A gather reads as much of a table as it writes. Bags read one row of the table per id.
    """
    rule, written = rule_of(op.target), sum(map(size, op.outputs))
    if rule.traffic is Traffic.BAGGED:
        ids, bags = (sum(map(size, refs(op.argument(key)))) for key in ("indices", "offsets"))
        return written + ids + size(op.outputs[0]) * ids // max(bags, 1)
    if rule.traffic is Traffic.NONE:
        copied = graph.tensors[op.outputs[0]].storage == op.outputs[0]
        return 2 * written if copied and rule.kind is OpKind.CONTIGUOUS else 0
    return written + (written if rule.traffic is Traffic.GATHERED else sum(map(size, op.inputs)))
