"""JSON as dataclasses: each value is what its field asks for, or is told with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.runtime.ranks.metrics import Count, NotARecordError, parsed, record


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    pair: tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    count: Count
    share: float
    is_on: bool = False
    note: str | None = None
    number: float | int | bool | None = None
    inner: Mapping[str, Inner]
    rows: tuple[tuple[Count, ...], ...] = ()


GOOD: dict[str, Any] = {"count": 3, "share": 1, "inner": {"a": {"pair": [1, "x"]}}}


def test_values_come_as_their_fields_have_them() -> None:
    found = record(Outer, {**GOOD, "number": 3, "rows": [[1], []]})
    assert found == Outer(
        count=3, share=1.0, number=3, inner={"a": Inner(pair=(1, "x"))}, rows=((1,), ())
    )
    assert type(found.share) is float
    assert type(found.number) is int


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({"count": -1}, "count: -1 is not 0 or more"),
        ({"count": True}, "count: True is not a whole number"),
        ({"count": "3"}, "count: '3' is not a whole number"),
        ({"share": 10**400}, "is not a finite number"),
        ({"share": float("nan")}, "share: nan is not a finite number"),
        ({"note": 3}, "note: 3 is not a text"),
        ({"note": "x" * 200_000}, "at most 100,000 characters"),
        ({"number": "3"}, "number: '3' is not a finite number"),
        ({"inner": []}, "inner: [] is not an object"),
        ({"inner": {"a": 3}}, "inner.a: 3 is not an object"),
        ({"inner": {"a\nb": {"pair": [1]}}}, "inner.a\\nb.pair: [1] is not a list of 2"),
        ({"rows": [[1, -1]]}, "rows.0.1: -1 is not 0 or more"),
        ({"mine": 1}, "mine: there is no such field"),
    ],
)
def test_a_wrong_value_is_told_with_its_place(edits: dict[str, Any], told: str) -> None:
    with pytest.raises(NotARecordError) as raised:
        record(Outer, {**GOOD, **edits})
    assert told in str(raised.value)


def test_what_is_missing_is_told() -> None:
    with pytest.raises(NotARecordError, match="share is missing"):
        record(Outer, {"count": 3, "inner": {}})


def test_a_text_that_is_no_json_is_a_value_error() -> None:
    for text in ("{", "[" * 100_000, "9" * 5000):
        with pytest.raises(ValueError, match=r"."):
            parsed(text)
