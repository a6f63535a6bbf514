"""Indices of an index are one index where the first one keeps every dim."""

from __future__ import annotations

import pytest

from autopar.codegen.text.expressions import Binding as Level
from autopar.codegen.text.expressions import (
    Expression,
    Fact,
    LocalTensor,
    SourceForm,
    at_dim,
    indexed,
    literal,
    rendered,
    replaced,
    text,
)
from autopar.planner.graph.layouts import WHOLE

X, Y = (LocalTensor(name, WHOLE) for name in "xy")
TO_3 = SourceForm((":", "3"))


def name_of(piece: LocalTensor | Fact) -> tuple[str, Level]:
    assert isinstance(piece, LocalTensor)
    return piece.tensor, Level.CALL


def of_y(expression: Expression, y: Expression) -> str:
    """Return the text of an expression in which y stands for another."""
    return rendered(replaced(expression, {Y: y}.get), name_of)[0]


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [
        (at_dim(1, TO_3), at_dim(3, TO_3), "x[:, :3, :, :3]"),
        (at_dim(0, TO_3), at_dim(1, literal(2)), "x[:3, 2]"),
        (at_dim(1, text("None")), at_dim(2, text("None")), "x[:, None, None]"),
        (at_dim(1, TO_3), at_dim(1, TO_3), "x[:, :3][:, :3]"),
        (at_dim(2, TO_3), at_dim(1, TO_3), "x[:, :, :3][:, :3]"),
        (at_dim(1, literal(2)), at_dim(2, TO_3), "x[:, 2][:, :, :3]"),  # other dims by then
        (at_dim(0, X), at_dim(2, TO_3), "x[x][:, :, :3]"),
        (at_dim(1, TO_3), at_dim(-1, literal(0)), "x[:, :3][..., 0]"),
        (at_dim(-1, TO_3), at_dim(2, literal(0)), "x[..., :3][:, :, 0]"),
    ],
)
def test_an_index_follows_in_the_same_brackets_if_its_dim_is_later(
    first: SourceForm, second: SourceForm, written: str
) -> None:
    assert of_y(indexed(Y, second), indexed(X, first)) == written


def test_three_indices_are_one() -> None:
    two = replaced(indexed(Y, at_dim(1, TO_3)), {Y: indexed(X, at_dim(0, TO_3))}.get)
    assert of_y(indexed(Y, at_dim(3, literal(0))), two) == "x[:3, :3, :, 0]"
