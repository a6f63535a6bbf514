"""Signatures of ops that cut, join and gather along a dim."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.planner.extent import Extent, constant, numel
from autopar.planner.ops import refs
from autopar.planner.rules.shapes import aligned, of_first, opaque
from autopar.planner.rules.signature import Case, Letters, Signature, names_of
from autopar.planner.rules.terms import concat


def split(case: Case) -> Signature:
    """A dim is cut into parts that tile it: it is the concatenation of the parts."""
    letters = Letters()
    shapes = [case.shape(name) for name in case.op.outputs]
    shape = case.shape(case.first)
    dim = case.number("dim") % len(shape)
    dims = list(letters.of(shape))
    parts = [letters.new(s[dim]) for s in shapes]
    rest = _size_sum(s[dim] for s in shapes)
    if rest != shape[dim]:  # some parts are unused and were dropped
        return opaque(case)
    dims[dim] = concat(parts)
    results = tuple(
        (name, (*dims[:dim], part, *dims[dim + 1 :]))
        for name, part in zip(case.op.outputs, parts, strict=True)
    )
    return Signature(operands=of_first(case, tuple(dims)), results=results)


def cat(case: Case) -> Signature:
    """The result's dim is the concatenation of the inputs'; an empty input has the other dims."""
    letters = Letters()
    rank = len(case.shape(case.result))
    dim = case.number("dim") % rank
    out = list(letters.of(case.shape(case.result)))
    names = [name for name in refs(case.argument("tensors")) if len(case.shape(name)) == rank]
    pieces = [letters.new(case.shape(name)[dim]) for name in names]
    operands = tuple(
        (name, (*out[:dim], piece, *out[dim + 1 :]))
        for name, piece in zip(names, pieces, strict=True)
    )
    is_empty = [numel(case.shape(name)) == Extent(()) for name in names]
    out[dim] = concat([piece for piece, empty in zip(pieces, is_empty, strict=True) if not empty])
    return Signature(
        operands=operands,
        results=((case.result, tuple(out)),),
        whole=names_of(*(piece for piece, empty in zip(pieces, is_empty, strict=True) if empty)),
    )


def stack(case: Case) -> Signature:
    """The inputs lie along a new dim."""
    letters = Letters()
    out = letters.of(case.shape(case.result))
    dim = case.number("dim") % len(out)
    rest = (*out[:dim], *out[dim + 1 :])
    operands = tuple((name, rest) for name in refs(case.argument("tensors")))
    return Signature(operands=operands, results=((case.result, out),), whole=names_of(out[dim]))


def sliced(case: Case) -> Signature:
    """A cut along one dim: a part of a concatenation where its fellows tile the dim."""
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dim = case.number("dim") % len(shape)
    letters = Letters()
    dims = list(letters.of(shape))
    if shape[dim] == out_shape[dim]:
        return Signature(
            operands=of_first(case, tuple(dims)), results=((case.result, tuple(dims)),)
        )
    if case.tiles is not None:
        sizes, position = case.tiles
        parts = [letters.new(size) for size in sizes]
        dims[dim] = concat(parts)
        part, whole = parts[position], frozenset[str]()
    else:
        part, whole = letters.new(out_shape[dim]), names_of(dims[dim])
        whole |= names_of(part)
    out = (*dims[:dim], part, *dims[dim + 1 :])
    return Signature(
        operands=of_first(case, tuple(dims)), results=((case.result, out),), whole=whole
    )


def selected(case: Case) -> Signature:
    """One position of a dim; the dim goes away and may not be split."""
    dims = Letters().of(case.shape(case.first))
    dim = case.number("dim") % len(dims)
    out = (*dims[:dim], *dims[dim + 1 :])
    results = tuple((name, out) for name in case.op.outputs)
    return Signature(operands=of_first(case, dims), results=results, whole=names_of(dims[dim]))


def padded(case: Case) -> Signature:
    """Dims that are padded, or cut off, may not be split; the others are kept."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dims, out, whole = letters.of(shape), [], frozenset[str]()
    ends = case.argument("pad")
    assert isinstance(ends, tuple)  # of the last dim first
    for i, (dim, size, total) in enumerate(zip(dims, shape, out_shape, strict=True)):
        place = 2 * (len(shape) - 1 - i)
        is_kept = size == total and all(end == 0 for end in ends[place : place + 2])
        new = dim if is_kept else letters.new(total)
        out.append(new)
        if not is_kept:
            whole |= names_of(dim, new)
    return Signature(
        operands=of_first(case, dims), results=((case.result, tuple(out)),), whole=whole
    )


def indexed(case: Case) -> Signature:
    """Gathers by index tensors: indexed dims may not be split, the indices' dims are kept."""
    letters = Letters()
    shape = case.shape(case.first)
    if case.tiles is not None:
        return _indexed_tile(case)
    indices = case.argument("indices")
    assert isinstance(indices, tuple)
    given = [(i, next(refs(index))) for i, index in enumerate(indices) if index is not None]
    if any(case.tensors[name].dtype == "bool" for _, name in given):
        return opaque(case)
    dims = letters.of(shape)
    rank = max(len(case.shape(name)) for _, name in given)
    out_shape = case.shape(case.result)
    places = [i for i, _ in given]
    adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if adjacent else 0
    index_dims = letters.of(out_shape[start : start + rank])
    kept = [dim for i, dim in enumerate(dims) if i not in places]
    before = kept[:start]
    out = (*before, *index_dims, *kept[len(before) :])
    operands = [(case.first, dims)]
    operands += [(name, aligned(index_dims, case.shape(name))) for _, name in given]
    whole = names_of(*(dims[i] for i in places))
    return Signature(operands=tuple(operands), results=((case.result, out),), whole=whole)


def _indexed_tile(case: Case) -> Signature:
    """An index of one constant position is a tile of size one."""
    assert case.tiles is not None
    indices = case.argument("indices")
    assert isinstance(indices, tuple)
    dim = next(i for i, index in enumerate(indices) if index is not None)
    letters = Letters()
    dims = list(letters.of(case.shape(case.first)))
    sizes, position = case.tiles
    parts = [letters.new(size) for size in sizes]
    dims[dim] = concat(parts)
    out = (*dims[:dim], parts[position], *dims[dim + 1 :])
    return Signature(operands=of_first(case, tuple(dims)), results=((case.result, out),))


def gathered(case: Case) -> Signature:
    """gather along `dim`: that dim may not be split, the others belong together."""
    letters = Letters()
    out_shape, shape = case.shape(case.result), case.shape(case.first)
    if len(shape) != len(out_shape):  # of one number, or at one place
        return opaque(case)
    out = letters.of(out_shape)
    dim = case.number("dim") % max(len(shape), 1)
    dims = tuple(
        out[i] if i != dim and size == out_shape[i] else letters.new(size)
        for i, size in enumerate(shape)
    )
    index = case.tensor("index")
    operands = (*of_first(case, dims), *(((index, out),) if index else ()))
    whole = names_of(*(d for d, o in zip(dims, out, strict=True) if d != o))
    return Signature(operands=operands, results=((case.result, out),), whole=whole)


def scattered(case: Case) -> Signature:
    """A part of a dim (or one position of it) is written anew: the other dims are kept."""
    letters = Letters()
    out = letters.of(case.shape(case.result))
    dim = case.number("dim") % len(out)
    given = case.tensor("src") or ""
    size = case.shape(given)
    part = (letters.new(size[dim]),) if len(size) == len(out) else ()
    return Signature(
        operands=((case.first, out), (given, (*out[:dim], *part, *out[dim + 1 :]))),
        results=((case.result, out),),
        whole=names_of(out[dim], *part),
    )


def _size_sum(sizes: Iterable[Extent]) -> Extent:
    total = constant(0)
    for size in sizes:
        total = total + size
    return total
