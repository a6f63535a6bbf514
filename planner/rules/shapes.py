"""Signatures of ops whose dims follow from their arguments: views, cuts, reductions, broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autopar.planner.axes.terms import UNIT, Dim, concat, product
from autopar.planner.extent import ONE, Extent, constant, numel
from autopar.planner.graph import refs
from autopar.planner.rules.signature import Case, Dims, Letters, Signature, names_of

ShapeFunction = Callable[[Case], Signature]


def elementwise(case: Case) -> Signature:
    """All tensors share the result's dims, aligned on the right; dims of size one are broadcast."""
    letters = Letters()
    out = letters.of(case.shape(case.result))
    operands = tuple((name, _aligned(out, case.shape(name))) for name in case.op.inputs)
    results = tuple((name, _aligned(out, case.shape(name))) for name in case.op.outputs)
    return Signature(operands=operands, results=results)


def _aligned(dims: Dims, shape: Sequence[Extent]) -> Dims:
    tail = dims[len(dims) - len(shape) :]
    return tuple(UNIT if size == ONE else dim for dim, size in zip(tail, shape, strict=True))


def over(*names: str) -> ShapeFunction:
    """The dims in the argument may not be split; the result has the input's dims (softmax)."""

    def signature(case: Case) -> Signature:
        dims = Letters().of(case.shape(case.first))
        chosen = _chosen(case, names, len(dims))
        results = tuple((name, dims) for name in case.op.outputs)
        whole = names_of(*(dims[i] for i in chosen))
        return Signature(operands=_first(case, dims), results=results, whole=whole)

    return signature


def reduced(*, partial: bool) -> ShapeFunction:
    """The dims in `dim` go away; a sum may be split along them, a maximum may not."""

    def signature(case: Case) -> Signature:
        dims = Letters().of(case.shape(case.first))
        chosen = _chosen(case, ("dim",), len(dims))
        out = [UNIT if i in chosen else dim for i, dim in enumerate(dims)]
        if not case.argument("keepdim"):
            out = [dim for i, dim in enumerate(dims) if i not in chosen]
        whole = frozenset() if partial else names_of(*(dims[i] for i in chosen))
        results = tuple((name, tuple(out)) for name in case.op.outputs)
        return Signature(operands=_first(case, dims), results=results, whole=whole)

    return signature


def _chosen(case: Case, names: tuple[str, ...], rank: int) -> frozenset[int]:
    numbers = case.numbers(*names)
    return frozenset(n % rank for n in numbers) if numbers and rank else frozenset(range(rank))


def reshape(case: Case) -> Signature:
    """Dims are regrouped: each group of input dims with the size of a group of result dims."""
    return regrouped(case, case.shape(case.first), case.shape(case.result))


def regrouped(case: Case, before: Sequence[Extent], after: Sequence[Extent]) -> Signature:
    """Walk both shapes; a size that divides the other becomes a letter of both."""
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
        if shared is None:  # the borders do not meet: nothing here can be told apart
            left[i].append(letters.new(rest_left))
            right[j].append(letters.new(rest_right))
            whole |= names_of(left[i][-1], right[j][-1])
            i, j, rest_left, rest_right = _after_mismatch(before, after, i, j)
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
    """Return the next place at which both shapes have passed the same number of elements."""
    for end_i in range(i + 1, len(before) + 1):
        for end_j in range(j + 1, len(after) + 1):
            if numel(tuple(before[end_i:])) == numel(tuple(after[end_j:])):
                nexts = before[end_i:], after[end_j:]
                return end_i, end_j, _first_size(nexts[0]), _first_size(nexts[1])
    return len(before), len(after), ONE, ONE


def permuted(order: Callable[[Case, int], Sequence[int]]) -> ShapeFunction:
    """The result's dims are the input's in another order."""

    def signature(case: Case) -> Signature:
        dims = Letters().of(case.shape(case.first))
        out = tuple(dims[i] for i in order(case, len(dims)))
        return Signature(operands=_first(case, dims), results=((case.result, out),))

    return signature


def transpose_order(case: Case, rank: int) -> Sequence[int]:
    """Swap dim0 and dim1."""
    order = list(range(rank))
    a, b = case.number("dim0") % rank, case.number("dim1") % rank
    order[a], order[b] = order[b], order[a]
    return order


def permute_order(case: Case, rank: int) -> Sequence[int]:
    """Take the dims as listed."""
    return [d % rank for d in case.numbers("dims")]


def reversed_order(_: Case, rank: int) -> Sequence[int]:
    """Turn all dims round."""
    return list(range(rank))[::-1]


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
        return _opaque(case)
    dims[dim] = concat(parts)
    results = tuple(
        (name, (*dims[:dim], part, *dims[dim + 1 :]))
        for name, part in zip(case.op.outputs, parts, strict=True)
    )
    return Signature(operands=_first(case, tuple(dims)), results=results)


def cat(case: Case) -> Signature:
    """The result's dim is the concatenation of the inputs'."""
    letters = Letters()
    names = [n for n in refs(case.argument("tensors")) if numel(case.shape(n)) != Extent(())]
    dim = case.number("dim") % len(case.shape(case.result))
    out = list(letters.of(case.shape(case.result)))
    parts = [letters.new(case.shape(name)[dim]) for name in names]
    operands = tuple(
        (name, (*out[:dim], part, *out[dim + 1 :])) for name, part in zip(names, parts, strict=True)
    )
    out[dim] = concat(parts)
    return Signature(operands=operands, results=((case.result, tuple(out)),))


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
        return Signature(operands=_first(case, tuple(dims)), results=((case.result, tuple(dims)),))
    if case.tiles is not None:
        sizes, position = case.tiles
        parts = [letters.new(size) for size in sizes]
        dims[dim] = concat(parts)
        part, whole = parts[position], frozenset[str]()
    else:
        part, whole = letters.new(out_shape[dim]), names_of(dims[dim])
        whole |= names_of(part)
    out = (*dims[:dim], part, *dims[dim + 1 :])
    return Signature(operands=_first(case, tuple(dims)), results=((case.result, out),), whole=whole)


def selected(case: Case) -> Signature:
    """One position of a dim; the dim goes away and may not be split."""
    dims = Letters().of(case.shape(case.first))
    dim = case.number("dim") % len(dims)
    out = (*dims[:dim], *dims[dim + 1 :])
    results = tuple((name, out) for name in case.op.outputs)
    return Signature(operands=_first(case, dims), results=results, whole=names_of(dims[dim]))


def expanded(case: Case) -> Signature:
    """Dims of size one, and new leading ones, are repeated: letters of the result alone."""
    out = Letters().of(case.shape(case.result))
    operand = _aligned_where_equal(out, case.shape(case.result), case.shape(case.first))
    return Signature(operands=_first(case, operand), results=((case.result, out),))


def _aligned_where_equal(out: Dims, sizes: Sequence[Extent], shape: Sequence[Extent]) -> Dims:
    offset = len(out) - len(shape)
    return tuple(
        out[offset + i] if size == sizes[offset + i] and size != ONE else UNIT
        for i, size in enumerate(shape)
    )


def repeated(case: Case) -> Signature:
    """Tiles: each dim of the result is (times · dim)."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dims = letters.of(shape)
    lead = len(out_shape) - len(shape)
    out: list[Dim] = list(letters.of(out_shape[:lead]))
    for dim, size, total in zip(dims, shape, out_shape[lead:], strict=True):
        times = total.divided_by(size)
        out.append(product((letters.new(times or ONE), dim)))
    return Signature(operands=_first(case, dims), results=((case.result, tuple(out)),))


def interleaved(case: Case) -> Signature:
    """Each position repeated in place: the result's dim is (dim · times)."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    if len(shape) != len(out_shape):
        return _opaque(case)
    dims = letters.of(shape)
    out = [
        product((dim, letters.new(total.divided_by(size) or ONE)))
        for dim, size, total in zip(dims, shape, out_shape, strict=True)
    ]
    return Signature(operands=_first(case, dims), results=((case.result, tuple(out)),))


def padded(case: Case) -> Signature:
    """Dims whose size changes may not be split; the others are kept."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dims, out, whole = letters.of(shape), [], frozenset[str]()
    for dim, size, total in zip(dims, shape, out_shape, strict=True):
        new = dim if size == total else letters.new(total)
        out.append(new)
        if size != total:
            whole |= names_of(dim, new)
    return Signature(operands=_first(case, dims), results=((case.result, tuple(out)),), whole=whole)


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
        return _opaque(case)
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
    operands += [(name, _aligned(index_dims, case.shape(name))) for _, name in given]
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
    return Signature(operands=_first(case, tuple(dims)), results=((case.result, out),))


def gathered(case: Case) -> Signature:
    """gather along `dim`: that dim may not be split, the others belong together."""
    letters = Letters()
    out_shape, shape = case.shape(case.result), case.shape(case.first)
    out = letters.of(out_shape)
    dim = case.number("dim") % max(len(shape), 1)
    dims = tuple(
        out[i] if i != dim and size == out_shape[i] else letters.new(size)
        for i, size in enumerate(shape)
    )
    index = case.tensor("index")
    operands = (*_first(case, dims), *(((index, out),) if index else ()))
    whole = names_of(*(d for d, o in zip(dims, out, strict=True) if d != o))
    return Signature(operands=operands, results=((case.result, out),), whole=whole)


def made(case: Case) -> Signature:
    """Tensors made from nothing: any dim may be split, for each rank makes its own part."""
    letters = Letters()
    results = tuple((name, letters.of(case.shape(name))) for name in case.op.outputs)
    operands = tuple((name, letters.of(case.shape(name))) for name in case.op.inputs)
    return Signature(operands=operands, results=results)


def einsum(case: Case) -> Signature:
    """The equation itself is the signature."""
    equation = str(case.argument("equation")).replace(" ", "")
    left, _, right = equation.partition("->")
    names = list(refs(case.argument("tensors")))
    terms = left.split(",")
    if "..." in equation or (not right and "->" not in equation) or len(terms) != len(names):
        return _opaque(case)
    letters, known = Letters(), dict[str, Dim]()

    def dims(term: str, name: str) -> Dims:
        sizes = zip(term, case.shape(name), strict=True)
        return tuple(
            UNIT if size == ONE else known.setdefault(letter, letters.new(size))
            for letter, size in sizes
        )

    operands = tuple((name, dims(term, name)) for term, name in zip(terms, names, strict=True))
    return Signature(operands=operands, results=((case.result, dims(right, case.result)),))


def attention(case: Case) -> Signature:
    """Query … h q [e], key … h [t] [e], value … h [t] [f] -> … h q [f].

    With fewer key heads than query heads, h is (k·g): each of k key heads serves a group of g.
    """
    query, key, value = (case.tensor(name) or "" for name in ("query", "key", "value"))
    letters = Letters()
    q_shape, k_shape, v_shape = case.shape(query), case.shape(key), case.shape(value)
    lead, (q, e) = list(letters.of(q_shape[:-2])), letters.of(q_shape[-2:])
    t, f = letters.new(k_shape[-2]), letters.new(v_shape[-1])
    named = {"q": q, "t": t, "e": e, "f": f}
    key_lead = list(lead)
    if len(lead) > 1:
        kv_size = k_shape[-3]
        if kv_size not in (q_shape[-3], ONE):
            group = q_shape[-3].divided_by(kv_size)
            named["k"], named["g"] = letters.new(kv_size), letters.new(group or ONE)
            lead[-1] = product((named["k"], named["g"]))
            key_lead[-1] = named["k"]
        else:
            named["h"] = lead[-1]
            key_lead[-1] = UNIT if kv_size == ONE else lead[-1]
        named |= {f"…{i}": dim for i, dim in enumerate(lead[:-1])}
    else:
        named |= {f"…{i}": dim for i, dim in enumerate(lead)}
    operands = [(query, (*lead, q, e)), (key, (*key_lead, t, e)), (value, (*key_lead, t, f))]
    mask = case.tensor("attn_mask")
    if mask is not None:
        operands.append((mask, _aligned((*lead, q, t), case.shape(mask))))
    return Signature(
        operands=tuple(operands),
        results=((case.result, (*lead, q, f)),),
        whole=names_of(t, e, f),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


def opaque(case: Case) -> Signature:
    """An op of which nothing is known but, where it is recognisable, its batch."""
    return _opaque(case)


def _opaque(case: Case) -> Signature:
    letters = Letters()
    batch: dict[Extent, Dim] = {}

    def dims(name: str) -> Dims:
        shape = case.shape(name)
        made_dims = list(letters.of(shape))
        if shape and not shape[0].is_constant:
            made_dims[0] = batch.setdefault(shape[0], made_dims[0])
        return tuple(made_dims)

    operands = tuple((name, dims(name)) for name in case.op.inputs)
    results = tuple((name, dims(name)) for name in case.op.outputs)
    every = names_of(*(d for _, ds in (*operands, *results) for d in ds))
    return Signature(operands=operands, results=results, whole=every - names_of(*batch.values()))


def _first(case: Case, dims: Dims) -> tuple[tuple[str, Dims], ...]:
    return ((case.first, dims),)


def _size_sum(sizes: Iterable[Extent]) -> Extent:
    total = constant(0)
    for size in sizes:
        total = total + size
    return total
