"""Signatures that follow from shapes and arguments: broadcasts, views, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from autopar.planner.graph.ops import ONE, Extent, Value, numel
from autopar.planner.rules.signature import (
    UNIT,
    Case,
    Dim,
    Dims,
    Letters,
    Signature,
    names_of,
    product,
    with_arguments,
)

ShapeFunction = Callable[[Case], Signature]


def elementwise(case: Case) -> Signature:
    """All tensors share the result's dims, aligned on the right; dims of size one are broadcast."""
    letters = Letters()
    out = letters.of(case.shape(case.result))
    operands = tuple((name, aligned(out, case.shape(name))) for name in case.op.inputs)
    results = tuple((name, aligned(out, case.shape(name))) for name in case.op.outputs)
    return Signature(operands=operands, results=results)


def of_type(case: Case) -> Signature:
    """The result has the dims of the first tensor; the second one only gives a dtype."""
    dims = Letters().of(case.shape(case.first))
    return Signature(operands=of_first(case, dims), results=((case.result, dims),))


def aligned(dims: Dims, shape: Sequence[Extent]) -> Dims:
    """Return the dims of a shape aligned on the right with `dims`; sizes of one are broadcast."""
    tail = dims[len(dims) - len(shape) :]
    return tuple(UNIT if size == ONE else dim for dim, size in zip(tail, shape, strict=True))


def paired(case: Case) -> Signature:
    """Operands are broadcast to one shape; the result has this shape, or is a scalar."""
    letters = Letters()
    shapes = [case.shape(name) for name in case.op.inputs]
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=ONE)
    dims = letters.of(tuple(next((s for s in own if s != ONE), ONE) for own in sizes)[::-1])
    operands = tuple((name, aligned(dims, case.shape(name))) for name in case.op.inputs)
    out = dims if case.shape(case.result) else ()
    return Signature(operands=operands, results=((case.result, out),))


def broadcast(case: Case) -> Signature:
    """Each tensor of a list is broadcast to their common shape."""
    out = Letters().of(case.shape(case.result))
    operands = tuple((name, aligned(out, case.shape(name))) for name in case.op.inputs)
    return Signature(operands=operands, results=tuple((name, out) for name in case.op.outputs))


@with_arguments
def over(case: Case, *names: str) -> Signature:
    """The dims listed in the arguments `names` may not be split; the result keeps the others."""
    if len(case.op.inputs) > 1:  # prepended and appended tensors are not supported
        return opaque(case)
    letters = Letters()
    dims = letters.of(case.shape(case.first))
    chosen = _chosen(case, names, len(dims))
    sizes = enumerate(case.shape(case.result))
    out = tuple(letters.new(size) if i in chosen else dims[i] for i, size in sizes)
    results = tuple((name, out) for name in case.op.outputs)
    whole = names_of(*(own[i] for own in (dims, out) for i in chosen))
    return Signature(operands=of_first(case, dims), results=results, whole=whole)


@with_arguments
def reduced(case: Case, *, partial: bool) -> Signature:
    """The dims that `dim` lists are reduced; the op may be split along them only if `partial`.

    A sum over shards is a partial sum, a maximum is not.
    """
    dims = Letters().of(case.shape(case.first))
    chosen = _chosen(case, ("dim",), len(dims))
    out = [UNIT if i in chosen else dim for i, dim in enumerate(dims)]
    if not case.op.given("keepdim"):
        out = [dim for i, dim in enumerate(dims) if i not in chosen]
    whole = frozenset() if partial else names_of(*(dims[i] for i in chosen))
    results = tuple((name, tuple(out)) for name in case.op.outputs)
    return Signature(
        operands=of_first(case, dims),
        results=results,
        whole=whole,
        letters={"r": product(dims[i] for i in sorted(chosen))},
    )


def _integers(value: Value) -> tuple[int, ...]:
    """Return the integers in an argument that is a list, or one integer."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in items if isinstance(item, int))


def _chosen(case: Case, names: tuple[str, ...], rank: int) -> frozenset[int]:
    numbers = _integers(case.op.given(*names))
    return frozenset(n % rank for n in numbers) if numbers and rank else frozenset(range(rank))


def reshape(case: Case) -> Signature:
    """Dims are regrouped: each group of input dims has the size of a group of result dims."""
    return regrouped(case, case.shape(case.first), case.shape(case.result))


def regrouped(case: Case, before: Sequence[Extent], after: Sequence[Extent]) -> Signature:
    """Return the signature of a view: equal factors of both shapes get the same letter.

    Where a dim of one shape is no product of factors of the other, the dims up to the next position
    with equally many elements in both get letters of their own, which may not be split.
    """
    letters = Letters()
    left: list[list[Dim]] = [[] for _ in before]
    right: list[list[Dim]] = [[] for _ in after]
    whole: frozenset[str] = frozenset()
    i = j = 0
    rest_left, rest_right = _first_size(before), _first_size(after)
    while i < len(before) and j < len(after):
        if rest_left == ONE:
            i, rest_left = i + 1, before[i + 1] if i + 1 < len(before) else ONE
            continue
        if rest_right == ONE:
            j, rest_right = j + 1, after[j + 1] if j + 1 < len(after) else ONE
            continue
        shared = _shared(rest_left, rest_right)
        if shared is None:  # neither size divides the other: the dims cannot be matched
            next_i, next_j, next_left, next_right = _after_mismatch(before, after, i, j)
            passed_left = letters.of((rest_left, *before[i + 1 : next_i]))
            passed_right = letters.of((rest_right, *after[j + 1 : next_j]))
            for dims, letter in zip(left[i:next_i], passed_left, strict=True):
                dims.append(letter)
            for dims, letter in zip(right[j:next_j], passed_right, strict=True):
                dims.append(letter)
            whole |= names_of(*passed_left, *passed_right)
            i, j, rest_left, rest_right = next_i, next_j, next_left, next_right
            continue
        letter = letters.new(shared)
        left[i].append(letter)
        right[j].append(letter)
        rest_left = rest_left.divided_by(shared) or ONE
        rest_right = rest_right.divided_by(shared) or ONE
    operands = ((case.first, tuple(map(product, left))),)
    return Signature(
        operands=operands, results=((case.result, tuple(map(product, right))),), whole=whole
    )


def _first_size(shape: Sequence[Extent]) -> Extent:
    return shape[0] if shape else ONE


def _shared(a: Extent, b: Extent) -> Extent | None:
    if a.divided_by(b) is not None:
        return b
    return a if b.divided_by(a) is not None else None


def _after_mismatch(
    before: Sequence[Extent], after: Sequence[Extent], i: int, j: int
) -> tuple[int, int, Extent, Extent]:
    """Return the next positions after which both shapes have the same number of elements left."""
    for end_i in range(i + 1, len(before) + 1):
        for end_j in range(j + 1, len(after) + 1):
            if numel(tuple(before[end_i:])) == numel(tuple(after[end_j:])):
                nexts = before[end_i:], after[end_j:]
                return end_i, end_j, _first_size(nexts[0]), _first_size(nexts[1])
    return len(before), len(after), ONE, ONE


@with_arguments
def permuted(case: Case, order: Callable[[Case, int], Sequence[int]]) -> Signature:
    """The result's dims are the input's in another order."""
    dims = Letters().of(case.shape(case.first))
    out = tuple(dims[i] for i in order(case, len(dims)))
    return Signature(operands=of_first(case, dims), results=((case.result, out),))


def transpose_order(case: Case, rank: int) -> Sequence[int]:
    """Swap dim0 and dim1."""
    order = list(range(rank))
    if rank == 0:
        return order
    a, b = case.op.number("dim0") % rank, case.op.number("dim1") % rank
    order[a], order[b] = order[b], order[a]
    return order


def permute_order(case: Case, rank: int) -> Sequence[int]:
    """Take the dims as listed."""
    return [d % rank for d in _integers(case.op.given("dims"))]


def matrix_order(_: Case, rank: int) -> Sequence[int]:
    """Swap the last two dims."""
    return [*range(rank - 2), rank - 1, rank - 2]


def reversed_order(_: Case, rank: int) -> Sequence[int]:
    """Reverse all dims."""
    return list(range(rank))[::-1]


def expanded(case: Case) -> Signature:
    """Dims of size one are repeated, and leading dims added: only the result has their letters."""
    out = Letters().of(case.shape(case.result))
    operand = _aligned_where_equal(out, case.shape(case.result), case.shape(case.first))
    return Signature(operands=of_first(case, operand), results=((case.result, out),))


@with_arguments
def as_other(case: Case, alone: ShapeFunction) -> Signature:
    """Add the tensor `other`, whose dims are the result's (`view_as`), to the signature `alone`."""
    signature = alone(case)
    ((_, out),) = signature.results
    other = case.op.tensor("other")
    return Signature(operands=(*signature.operands, (other, out)), results=signature.results)


def _aligned_where_equal(out: Dims, sizes: Sequence[Extent], shape: Sequence[Extent]) -> Dims:
    offset = len(out) - len(shape)
    return tuple(
        out[offset + i] if size == sizes[offset + i] and size != ONE else UNIT
        for i, size in enumerate(shape)
    )


def repeated(case: Case) -> Signature:
    """The whole tensor is repeated along its dims: each dim of the result is (times · dim)."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dims = letters.of(shape)
    lead = len(out_shape) - len(shape)
    out: list[Dim] = list(letters.of(out_shape[:lead]))
    for dim, size, total in zip(dims, shape, out_shape[lead:], strict=True):
        times = total.divided_by(size)
        out.append(product((letters.new(times or ONE), dim)))
    return Signature(operands=of_first(case, dims), results=((case.result, tuple(out)),))


def interleaved(case: Case) -> Signature:
    """Each position is repeated where it is: each dim of the result is (dim · times)."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    if len(shape) != len(out_shape):
        return opaque(case)
    dims = letters.of(shape)
    out = [
        product((dim, letters.new(total.divided_by(size) or ONE)))
        for dim, size, total in zip(dims, shape, out_shape, strict=True)
    ]
    return Signature(operands=of_first(case, dims), results=((case.result, tuple(out)),))


def made(case: Case) -> Signature:
    """New tensors: any dim may be split, because each rank makes its own part."""
    letters = Letters()
    results = tuple((name, letters.of(case.shape(name))) for name in case.op.outputs)
    operands = tuple((name, letters.of(case.shape(name))) for name in case.op.inputs)
    return Signature(operands=operands, results=results)


def opaque(case: Case) -> Signature:
    """A signature in which only the batch dim is known, if the op's tensors show one."""
    letters = Letters()
    batch: dict[Extent, Dim] = {}
    operands = tuple((name, by_batch(case.shape(name), letters, batch)) for name in case.op.inputs)
    results = tuple((name, by_batch(case.shape(name), letters, batch)) for name in case.op.outputs)
    every = names_of(*(d for _, ds in (*operands, *results) for d in ds))
    whole = every - names_of(*batch.values())
    return Signature(operands=operands, results=results, whole=whole, is_opaque=True)


def by_batch(shape: tuple[Extent, ...], letters: Letters, batch: dict[Extent, Dim]) -> Dims:
    """Return new letters; first dims share one if their sizes depend on the batch and are equal."""
    dims = list(letters.of(shape))
    if shape and not shape[0].is_constant:
        dims[0] = batch.setdefault(shape[0], dims[0])
    return tuple(dims)


def of_first(case: Case, dims: Dims) -> tuple[tuple[str, Dims], ...]:
    """Return the operands of an op whose signature has only the first tensor."""
    return ((case.first, dims),)
