"""Plain values become Python that is nothing but those values."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.codegen.text.values import (
    Source,
    assigned,
    call,
    identifier,
    literal,
    prose,
    remark,
    table,
    tuple_of,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner).map(tuple),
    max_leaves=5,
)  # fmt: skip


@given(PLAIN)
def test_a_literal_reads_back_as_the_value_and_is_one_line_of_ascii(value: object) -> None:
    text = literal(value)
    assert ast.literal_eval(text) == value
    assert text.isascii()
    assert "\n" not in text


@given(st.text())
def test_no_text_leaves_a_remark_or_a_docstring(text: str) -> None:
    assert ast.parse(remark(text)).body == []
    (statement,) = ast.parse(f'"""{prose(text)}\n"""').body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize("text", ["a b", "1a", "import", "a.b", "", "é", "a\n", "x;y"])
def test_what_is_no_identifier_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no identifier"):
        identifier(text)


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match="no plain value"):
        literal(object())


def test_a_tuple_of_one_keeps_its_comma() -> None:
    assert assigned("X", tuple_of("1")) == "X = (1,)"
    assert assigned("X", tuple_of(call("f", "1"))) == "X = (f(1),)"


def test_what_does_not_fit_stands_on_lines_of_its_own() -> None:
    text = assigned("X", call("f", "a" * 60, tuple_of("b" * 60, "c")), "why")
    assert text.splitlines()[:3] == ["# why", "X = f(", f"    {'a' * 60},"]
    assert text.endswith("\n)")


def test_a_remark_that_does_not_fit_stands_above_its_row() -> None:
    text = table("X", ("{", "}"), [('"k": ', "1", "short"), ('"l": ', "2", "long " * 30)])
    lines = text.splitlines()
    assert lines[1] == '    "k": 1,  # short'
    assert lines[2].startswith("    # long")
    assert lines[3] == '    "l": 2,'
    assert max(map(len, lines)) <= 100


def test_source_is_text() -> None:
    assert str(Source("a")) == "a"
