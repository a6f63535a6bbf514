"""Signatures that no single pattern tells: attention, products, einsum, losses, look-ups."""

from __future__ import annotations

from autopar.planner.extent import ONE, Extent
from autopar.planner.ops import refs
from autopar.planner.rules.shapes import ShapeFunction, aligned, by_batch, opaque
from autopar.planner.rules.signature import Case, Dims, Letters, Pattern, Signature, names_of
from autopar.planner.rules.terms import UNIT, Dim, product


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
        operands.append((mask, aligned((*lead, q, t), case.shape(mask))))
    return Signature(
        operands=tuple(operands),
        results=((case.result, (*lead, q, f)),),
        whole=names_of(t, e, f),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


def matmul(case: Case) -> Signature:
    """A product of matrices, of which either may be a single row or column."""
    ranks = tuple(len(case.shape(case.tensor(name) or "")) for name in ("self", "other"))
    return _PRODUCTS[ranks[0] == 1, ranks[1] == 1].signature(case)


_PRODUCTS = {
    (False, False): Pattern.parse("self … m k, other … k n -> … m n"),
    (False, True): Pattern.parse("self … m k, other k -> … m"),
    (True, False): Pattern.parse("self k, other … k n -> … n"),
    (True, True): Pattern.parse("self k, other k ->"),
}


_CLASSES = Pattern.parse("self n v …, target n …, weight? v ->")


def cross_entropy(case: Case) -> Signature:
    """Each row has one class; of targets that give every class a share nothing is said."""
    target = case.tensors[case.tensor("target") or ""]
    return _CLASSES.signature(case) if target.is_whole_numbered else opaque(case)


_ENTRIES = Pattern.parse("weight v d, indices … -> … d")


def embedding(case: Case) -> Signature:
    """Rows of a table; gradients by how often a row is taken need all that is taken of it."""
    is_counted = case.argument("scale_grad_by_freq")
    return opaque(case) if is_counted else _ENTRIES.signature(case)


_MAX = 2  # the mode of bags


def bags(case: Case) -> Signature:
    """Sums, means or maxima of rows of a table: weight v d, … -> b d.

    Columns of the table are columns of the result. Rows of it may lie on several ranks where the
    result is a sum. So is a mean, once each rank divides by how many entries a bag has. Bags begin
    at places among the indices, so these are not split.
    """
    if case.argument("scale_grad_by_freq"):
        return opaque(case)
    letters, batch = Letters(), dict[Extent, Dim]()
    weight = case.tensor("weight") or ""
    entries, columns = letters.of(case.shape(weight))
    dims = {
        name: by_batch(case.shape(name), letters, batch)
        for name in (*case.op.inputs, *case.op.outputs)
    }
    known = {weight: (entries, columns), case.result: (*dims[case.result][:1], columns)}
    named = {"v": entries, "d": columns}
    splits = (columns,) if case.argument("mode") == _MAX else (entries, columns)
    every = names_of(*(dim for own in (dims | known).values() for dim in own))
    return Signature(
        operands=tuple((name, (dims | known)[name]) for name in case.op.inputs),
        results=tuple((name, (dims | known)[name]) for name in case.op.outputs),
        whole=every - names_of(*splits),
        letters={name: dim for name, dim in named.items() if dim != UNIT},
    )


def added_product(first: str, second: str) -> ShapeFunction:
    """Self + first (b) m k · second (b) k n -> (b) m n; self may be broadcast over any of them."""

    def signature(case: Case) -> Signature:
        left, right = case.tensor(first) or "", case.tensor(second) or ""
        letters = Letters()
        *lead, m, k = letters.of(case.shape(left))
        n = letters.new(case.shape(right)[-1])
        out = (*lead, m, n)
        added = case.tensor("self") or ""
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

    return signature


def einsum(case: Case) -> Signature:
    """The equation itself is the signature."""
    names = list(refs(case.argument("tensors")))
    terms, result = _terms(str(case.argument("equation")), [len(case.shape(n)) for n in names])
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

    What `...` stands for is numbered from the right, where such dims are aligned. An equation that
    names no result has what it names once, in the order of the alphabet.
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
