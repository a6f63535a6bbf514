"""Prints what a call is given: tensors, numbers and types, alone or in containers."""

from __future__ import annotations

from collections.abc import Callable

from autopar.codegen.forward.at_hand import AtHand
from autopar.codegen.forward.reading.results import is_mapping, pairs
from autopar.codegen.forward.text.expressions import Expression, mapped, sequence, text
from autopar.codegen.forward.text.literals import literal
from autopar.planner.extent import Extent
from autopar.planner.ops import DType, Mapped, Ref, Value


def _no_other(value: Value) -> Expression:
    raise AssertionError(f"{value!r} cannot be printed")


def printed_argument(
    value: Value,
    other: Value,
    body: AtHand,
    *,
    tensor: Callable[[str], Expression],
    rest: Callable[[Value], Expression] = _no_other,
) -> Expression:
    """Print an argument, which is `other` where the inputs have other lengths.

    `tensor` prints one by its name, `rest` what is no tensor, number, type, tuple, list or dict.
    """

    def inner(one: Value, two: Value) -> Expression:
        return printed_argument(one, two, body, tensor=tensor, rest=rest)

    if isinstance(value, Ref):
        return tensor(value.tensor)
    if isinstance(value, Mapped):
        assert isinstance(other, Mapped)  # of the same call
        shown = zip(pairs(value), pairs(other), strict=True)
        return mapped((literal(key), inner(one, two)) for (key, one), (_, two) in shown)
    if isinstance(value, tuple) and not is_mapping(value):
        assert isinstance(other, tuple)
        given = sequence(value, tuple(map(inner, value, other)))
        return text(body.containers[given]) if given in body.containers else given
    if value is None or isinstance(value, (bool, int, float, Extent)):
        return body.plain_size(value, other)
    if isinstance(value, DType):
        own = body.dtype() if value.name == "model" else None
        return own if own is not None else text(f"torch.{value.name}")
    return rest(value)
