"""Tells how the result of a call can be printed: as a tensor, as a tuple, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.ops import Fields, Mapped, NamedFields, Ref, Value


def is_mapping(value: Value) -> bool:
    """Whether a recorded result or argument is made of pairs: a dict, or an object with fields."""
    return isinstance(value, (Mapped, Fields)) and bool(value)


def as_tuple(value: Value) -> Value:
    """Return a namedtuple as the tuple of its values, and any other value as it is."""
    return tuple(item for _, item in pairs(value)) if isinstance(value, NamedFields) else value


def pairs(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the keys of a dict, or the fields of an object, and what they stand for."""
    assert isinstance(value, tuple)
    for item in value:
        assert isinstance(item, tuple)
        key, inner = item
        yield str(key), inner


def held(value: Value, place: str) -> Iterator[tuple[str, Value]]:
    """Yield what a container or an object holds, each behind the code that reaches it.

    `place` is the code of the value itself.
    """
    if is_mapping(value):
        for key, inner in pairs(value):
            yield f"{place}.{key}" if isinstance(value, Fields) else f'{place}["{key}"]', inner
    elif isinstance(value, tuple):
        for number, inner in enumerate(value):
            yield f"{place}[{number}]", inner


def leaves(value: Value, place: str) -> Iterator[tuple[str, Value]]:
    """Yield what is in a value at any depth, each behind the code that reaches it."""
    if not isinstance(value, tuple):
        yield place, value
    for inner, one in held(value, place):
        yield from leaves(one, inner)


def is_plain(value: Value) -> bool:
    """Whether a result is made of tensors, numbers and tuples: no mapping, no object, no text."""
    if isinstance(value, tuple):
        return not is_mapping(value) and all(map(is_plain, value))
    return value is None or isinstance(value, (Ref, bool, int, float, complex))
