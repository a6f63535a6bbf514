"""Turns the signature of a contraction into the shapes of its matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from autopar.planner.costs.ops.shapes import LocalShapes
from autopar.planner.ops import Op, refs
from autopar.planner.rules.computation import Product
from autopar.planner.rules.table import rule_of
from autopar.planner.rules.terms import Dim, leaves


def products_of(op: Op, shapes: LocalShapes) -> Iterator[Product]:
    """Yield the matrix products of a contraction on one rank, from left to right.

    Letters of both factors and the result are the batch; those of one factor and the result are m
    or n; those of both that the result lacks are contracted. What one factor alone has (the number
    of groups) multiplies nothing.
    """
    names = factors_of(op)
    if shapes.signature.whole:  # the rule did not fit: all that is known are the shapes
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


def _by_shapes(op: Op, names: tuple[str, ...], shapes: LocalShapes) -> Product:
    """Return rows by the first factor's last dim by columns, as in a plain matmul."""
    result = shapes.shape(op.outputs[0]) or (1,)
    return Product(
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
) -> Product:
    needed = set(later)
    return Product(
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
