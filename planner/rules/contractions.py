"""Signatures of attention, products, einsum, losses, look-ups, and of ops that cut or join dims."""

from __future__ import annotations

from autopar.planner.graph.ops import ONE, Extent, numel, refs
from autopar.planner.rules.shapes import aligned, by_batch, of_first, opaque
from autopar.planner.rules.signature import (
    UNIT,
    Case,
    Dim,
    Dims,
    Letters,
    Pattern,
    Signature,
    Tiles,
    concat,
    names_of,
    product,
    with_arguments,
)


def attention(case: Case) -> Signature:
    """Query … h q [e], key … h [t] [e], value … h [t] [f] -> … h q [f].

    With fewer key heads than query heads, h is (k·g): each of k key heads serves g query heads.
    """
    query, key, value = (case.op.tensor(name) for name in ("query", "key", "value"))
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
    mask = case.op.tensor("attn_mask")
    if mask:
        operands.append((mask, aligned((*lead, q, t), case.shape(mask))))
    return Signature(
        operands=tuple(operands),
        results=((case.result, (*lead, q, f)),),
        whole=names_of(t, e, f),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


def matmul(case: Case) -> Signature:
    """A product of matrices, either of which may be a vector."""
    ranks = tuple(len(case.shape(case.op.tensor(name))) for name in ("self", "other"))
    return _PRODUCTS[ranks[0] == 1, ranks[1] == 1].signature(case)


_PRODUCTS = {
    (False, False): Pattern.parse("self … m k, other … k n -> … m n"),
    (False, True): Pattern.parse("self … m k, other k -> … m"),
    (True, False): Pattern.parse("self k, other … k n -> … n"),
    (True, True): Pattern.parse("self k, other k ->"),
}


_CLASSES = Pattern.parse("self n v …, target n …, weight? v ->")


def cross_entropy(case: Case) -> Signature:
    """Each row has one class; with class probabilities as targets, the signature is opaque."""
    target = case.tensors[case.op.tensor("target")]
    return _CLASSES.signature(case) if target.is_whole_numbered else opaque(case)


_ENTRIES = Pattern.parse("weight v d, indices … -> … d")


def embedding(case: Case) -> Signature:
    """Rows of a table; opaque with scale_grad_by_freq, whose gradient depends on all indices."""
    is_counted = case.op.given("scale_grad_by_freq")
    return opaque(case) if is_counted else _ENTRIES.signature(case)


_MAX = 2  # the mode of bags that take maxima


def bags(case: Case) -> Signature:
    """Sums, means or maxima of rows of a table: weight v d, … -> b d.

    Columns of the table are columns of the result. Rows of the table may be split if the result is
    a sum, or a mean, for which each rank divides by the number of all entries of the bag. The
    indices are not split, because the offsets of bags count along them.
    """
    if case.op.given("scale_grad_by_freq"):
        return opaque(case)
    letters, batch = Letters(), dict[Extent, Dim]()
    weight = case.op.tensor("weight")
    entries, columns = letters.of(case.shape(weight))
    dims = {
        name: by_batch(case.shape(name), letters, batch)
        for name in (*case.op.inputs, *case.op.outputs)
    }
    known = {weight: (entries, columns), case.result: (*dims[case.result][:1], columns)}
    named = {"v": entries, "d": columns}
    splits = (columns,) if case.op.given("mode") == _MAX else (entries, columns)
    every = names_of(*(dim for own in (dims | known).values() for dim in own))
    return Signature(
        operands=tuple((name, (dims | known)[name]) for name in case.op.inputs),
        results=tuple((name, (dims | known)[name]) for name in case.op.outputs),
        whole=every - names_of(*splits),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


@with_arguments
def added_product(case: Case, first: str, second: str) -> Signature:
    """Self + first (b) m k · second (b) k n -> (b) m n; self may be broadcast along each dim."""
    left, right = case.op.tensor(first), case.op.tensor(second)
    letters = Letters()
    *lead, m, k = letters.of(case.shape(left))
    n = letters.new(case.shape(right)[-1])
    out = (*lead, m, n)
    added = case.op.tensor("self")
    named = {"m": m, "k": k, "n": n} | dict(zip("b", lead, strict=False))
    return Signature(
        operands=(
            (added, aligned(out, case.shape(added))),
            (left, (*lead, m, k)),
            (right, (*lead, k, n)),
        ),
        results=((case.result, out),),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


def einsum(case: Case) -> Signature:
    """The equation itself is the signature."""
    names = list(refs(case.op.given("tensors")))
    terms, result = _terms(str(case.op.given("equation")), [len(case.shape(n)) for n in names])
    if len(terms) != len(names):
        return opaque(case)
    letters, known = Letters(), dict[str, Dim]()

    def dims(term: tuple[str, ...], name: str) -> Dims:
        sizes = zip(term, case.shape(name), strict=True)
        return tuple(
            UNIT if size == ONE else known.setdefault(letter, letters.new(size))
            for letter, size in sizes
        )

    operands = tuple((name, dims(term, name)) for term, name in zip(terms, names, strict=True))
    return Signature(operands=operands, results=((case.result, dims(result, case.result)),))


def _terms(equation: str, ranks: list[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the letters of each operand of an equation, and those of its result.

    The dims of `...` are numbered from the right, because they are aligned there. The result of an
    equation without `->` has the letters that occur once, in alphabetical order.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    counts = [rank - len(term.replace(_MANY, "")) for term, rank in zip(given, ranks, strict=False)]
    many = max((n for n, term in zip(counts, given, strict=False) if _MANY in term), default=0)
    if not arrow:
        right = _MANY + "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
    terms = [_spelt(term, count) for term, count in zip(given, counts, strict=False)]
    return terms, _spelt(right, many)


_MANY = "..."


def _spelt(term: str, many: int) -> tuple[str, ...]:
    before, dots, after = term.partition(_MANY)
    numbered = (f"…{position}" for position in range(many if dots else 0, 0, -1))
    return (*before, *numbered, *after)


def split(case: Case) -> Signature:
    """A dim is cut into parts that tile it: it is the concatenation of the parts."""
    letters = Letters()
    shapes = [case.shape(name) for name in case.op.outputs]
    shape = case.shape(case.first)
    dim = case.op.number("dim") % len(shape)
    dims = list(letters.of(shape))
    parts = [letters.new(s[dim]) for s in shapes]
    rest = sum((s[dim] for s in shapes), Extent(()))
    if rest != shape[dim]:  # unused parts were dropped
        return opaque(case)
    dims[dim] = concat(parts)
    results = tuple(
        (name, (*dims[:dim], part, *dims[dim + 1 :]))
        for name, part in zip(case.op.outputs, parts, strict=True)
    )
    return Signature(operands=of_first(case, tuple(dims)), results=results)


def cat(case: Case) -> Signature:
    """The result's dim is the concatenation of the inputs'; all inputs share the other dims."""
    letters = Letters()
    rank = len(case.shape(case.result))
    dim = case.op.number("dim") % rank
    out = list(letters.of(case.shape(case.result)))
    names = [name for name in refs(case.op.given("tensors")) if len(case.shape(name)) == rank]
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
    dim = case.op.number("dim") % len(out)
    rest = (*out[:dim], *out[dim + 1 :])
    operands = tuple((name, rest) for name in refs(case.op.given("tensors")))
    return Signature(operands=operands, results=((case.result, out),), whole=names_of(out[dim]))


def sliced(case: Case) -> Signature:
    """A slice of one dim: a part of a concatenation, if other slices take the rest of the dim."""
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dim = case.op.number("dim") % len(shape)
    letters = Letters()
    dims = list(letters.of(shape))
    if shape[dim] == out_shape[dim]:
        return Signature(
            operands=of_first(case, tuple(dims)), results=((case.result, tuple(dims)),)
        )
    if case.tiles is not None:
        dims[dim], part = _tiled(case.tiles, letters)
        whole = frozenset[str]()
    else:
        part, whole = letters.new(out_shape[dim]), names_of(dims[dim])
        whole |= names_of(part)
    out = (*dims[:dim], part, *dims[dim + 1 :])
    return Signature(
        operands=of_first(case, tuple(dims)), results=((case.result, out),), whole=whole
    )


def _tiled(tiles: Tiles, letters: Letters) -> tuple[Dim, Dim]:
    """Return a dim as a concatenation of tiles, and the tile that an op takes."""
    sizes, position = tiles
    parts = [letters.new(size) for size in sizes]
    return concat(parts), parts[position]


def selected(case: Case) -> Signature:
    """One position of a dim; the dim disappears and may not be split."""
    dims = Letters().of(case.shape(case.first))
    dim = case.op.number("dim") % len(dims)
    out = (*dims[:dim], *dims[dim + 1 :])
    results = tuple((name, out) for name in case.op.outputs)
    return Signature(operands=of_first(case, dims), results=results, whole=names_of(dims[dim]))


def padded(case: Case) -> Signature:
    """Padded or cropped dims may not be split; the others are kept."""
    letters = Letters()
    shape, out_shape = case.shape(case.first), case.shape(case.result)
    dims, out, whole = letters.of(shape), [], frozenset[str]()
    ends = case.op.given("pad")
    assert isinstance(ends, tuple)  # the last dim first
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
    """`x[i, :, j]` with index tensors: the result has the dims of the indices, and the others of x.

    The indexed dims may not be split.
    """
    letters = Letters()
    shape = case.shape(case.first)
    if case.tiles is not None:
        return _indexed_tile(case)
    indices = case.op.given("indices")
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
    """An index with one constant position takes a tile of size one."""
    assert case.tiles is not None
    indices = case.op.given("indices")
    assert isinstance(indices, tuple)
    dim = next(i for i, index in enumerate(indices) if index is not None)
    letters = Letters()
    dims = list(letters.of(case.shape(case.first)))
    dims[dim], part = _tiled(case.tiles, letters)
    out = (*dims[:dim], part, *dims[dim + 1 :])
    return Signature(operands=of_first(case, tuple(dims)), results=((case.result, out),))


def gathered(case: Case) -> Signature:
    """torch.gather along `dim`: this dim may not be split; the tensors share the other dims."""
    letters = Letters()
    out_shape, shape = case.shape(case.result), case.shape(case.first)
    if len(shape) != len(out_shape):  # the source or the index is a scalar
        return opaque(case)
    out = letters.of(out_shape)
    dim = case.op.number("dim") % max(len(shape), 1)
    dims = tuple(
        out[i] if i != dim and size == out_shape[i] else letters.new(size)
        for i, size in enumerate(shape)
    )
    index = case.op.tensor("index")
    operands = (*of_first(case, dims), *(((index, out),) if index else ()))
    whole = names_of(*(d for d, o in zip(dims, out, strict=True) if d != o))
    return Signature(operands=operands, results=((case.result, out),), whole=whole)


def scattered(case: Case) -> Signature:
    """A part of a dim (or one position) is overwritten: the other dims are kept."""
    letters = Letters()
    out = letters.of(case.shape(case.result))
    dim = case.op.number("dim") % len(out)
    given = case.op.tensor("src")
    size = case.shape(given)
    part = (letters.new(size[dim]),) if len(size) == len(out) else ()
    return Signature(
        operands=((case.first, out), (given, (*out[:dim], *part, *out[dim + 1 :]))),
        results=((case.result, out),),
        whole=names_of(out[dim], *part),
    )
