"""The table of conversions between layouts."""

from __future__ import annotations

from autopar.planner.graph.layouts import (
    CONVERSIONS,
    PARTIAL,
    REPLICATED,
    WHOLE,
    LayoutKind,
    LocalAction,
    conversion,
    split,
)


def test_every_pair_of_different_kinds_has_a_conversion() -> None:
    pairs = {(a, b) for a in LayoutKind for b in LayoutKind if a is not b}
    assert pairs <= CONVERSIONS.keys()


def test_equal_layouts_need_no_conversion() -> None:
    assert conversion(split("heads", 1), split("heads", 1)) is None


def test_another_axis_is_an_exchange() -> None:
    found = conversion(split("seq", 1), split("heads", 2))
    assert found is not None
    assert found.function == "exchange"


def test_a_conversion_back_and_forth_communicates_as_much() -> None:
    """Megatron's f and g are each other's backward."""
    there, back = conversion(WHOLE, REPLICATED), conversion(PARTIAL, WHOLE)
    assert there is not None
    assert back is not None
    assert (there.forward, there.backward) == (back.backward, back.forward)
    assert there.forward is LocalAction.NOTHING
