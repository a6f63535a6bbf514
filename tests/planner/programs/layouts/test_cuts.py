"""A dim is cut along an axis in the blocks that its structure says."""

from autopar.planner.graph.ops import Extent
from autopar.planner.programs.layouts.strategies import is_contiguous, is_cuttable, parts_of
from autopar.planner.rules.signature import UNIT, Concat, FlattenedDims, Leaf

HEADS, GROUP = Leaf("h", Extent.of(6)), Leaf("g", Extent.of(2))
HEAD_DIM, ROWS = Leaf("e", Extent.of(4)), Leaf("b", Extent.of(0, 1))
HEAD_ROWS = FlattenedDims((HEADS, HEAD_DIM))


def test_a_fused_projection_is_three_parts_of_heads() -> None:
    fused = Concat((HEAD_ROWS, HEAD_ROWS, HEAD_ROWS))
    assert parts_of(fused, "h", 1) == ((6, 4), (6, 4), (6, 4))
    assert is_contiguous(fused, "h", 1)


def test_heads_of_three_parts_each_are_one_part_of_larger_blocks() -> None:
    fused = FlattenedDims((HEADS, Concat((HEAD_DIM, HEAD_DIM, HEAD_DIM))))
    assert parts_of(fused, "h", 1) == ((6, 12),)


def test_an_inner_axis_is_cut_once_for_each_position_outside_of_it() -> None:
    dim = FlattenedDims((GROUP, HEADS, HEAD_DIM))
    assert parts_of(dim, "h", 1) == ((6, 4), (6, 4))
    assert not is_contiguous(dim, "h", 1)


def test_one_row_outside_of_an_axis_does_not_matter() -> None:
    dim = FlattenedDims((ROWS, HEADS))
    assert is_contiguous(dim, "h", 1)
    assert not is_contiguous(dim, "h", 2)


def test_an_axis_cuts_a_concatenation_that_has_it_in_every_part() -> None:
    assert is_cuttable(Concat((HEADS, HEAD_ROWS)), "h")
    assert not is_cuttable(Concat((HEADS, GROUP)), "h")
    assert not is_cuttable(Concat((UNIT, HEADS)), "h")


def test_an_axis_that_occurs_twice_in_a_product_does_not_cut_it() -> None:
    assert not is_cuttable(FlattenedDims((HEADS, HEADS)), "h")
