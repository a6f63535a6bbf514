"""Tells how the result of a call can be printed: as a tensor, as a tuple, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.ops import Ref, Value


def is_mapping(value: Value) -> bool:
    """Whether a recorded result or argument is a mapping: pairs of a key and its value."""
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
            for item in value
        )
    )


def pairs(value: tuple[Value, ...]) -> Iterator[tuple[str, Value]]:
    """Yield the keys of a dict and what they stand for."""
    for item in value:
        assert isinstance(item, tuple)
        key, inner = item
        yield str(key), inner


def is_plain(value: Value) -> bool:
    """Whether a result is made of tensors, numbers and tuples: no mapping, no object, no text."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (Ref, bool, int, float, complex))
