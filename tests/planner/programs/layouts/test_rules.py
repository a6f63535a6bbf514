"""A view that has a pinned axis as an inner factor stays free; any other op keeps the pin."""

from __future__ import annotations

import pytest

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.ops import Extent, Op
from autopar.planner.programs.layouts.rules import _is_view_of_inner
from autopar.planner.rules.signature import Concat, Dim, FlattenedDims, Leaf

BATCH, HEADS, HEAD_DIM, FFN = (
    Leaf(str(number), Extent.of(size)) for number, size in enumerate((2, 4, 8, 16))
)
NAMES = {"0": "batch", "1": "heads", "2": "head_dim", "3": "ffn"}
VIEW, GELU = "aten.view.default", "aten.gelu.default"


def merges(target: str, axis: str, taken: tuple[Dim, ...], given: tuple[Dim, ...]) -> bool:
    op = Op(
        name="y", target=target, arguments=(), inputs=("x",), outputs=("y",), call="",
        grad_enabled=True,
    )  # fmt: skip
    return _is_view_of_inner(
        op, axis, GraphAxes(names=NAMES, dims={"x": taken, "y": given}, ops={}, conflicts=())
    )


APART, FLAT = (BATCH, HEADS, HEAD_DIM), (BATCH, FlattenedDims((HEADS, HEAD_DIM)))
INSIDE = (BATCH, FlattenedDims((HEADS, Concat((HEAD_DIM, FFN)))))


@pytest.mark.parametrize(
    ("axis", "taken", "given", "is_merged"),
    [
        ("head_dim", APART, FLAT, True),
        ("head_dim", FLAT, APART, True),
        ("heads", APART, FLAT, False),  # the outermost: a split of it is a split of the product
        ("batch", APART, FLAT, False),
        ("head_dim", APART, APART, False),
        ("ffn", INSIDE, INSIDE, True),
    ],
)
def test_a_view_merges_the_inner_axes_of_what_it_flattens(
    axis: str, taken: tuple[Dim, ...], given: tuple[Dim, ...], *, is_merged: bool
) -> None:
    assert merges(VIEW, axis, taken, given) == is_merged


def test_what_computes_on_a_flat_dim_merges_nothing() -> None:
    assert not merges(GELU, "head_dim", FLAT, FLAT)
