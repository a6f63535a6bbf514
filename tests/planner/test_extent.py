"""Extents are polynomials: their arithmetic is checked against plain numbers for many batches."""

from functools import reduce
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.graph.ops import BATCH, ONE, Extent, constant, numel

coefficients = st.lists(st.integers(-9, 9), max_size=4)
extents = coefficients.map(lambda numbers: Extent.of(*numbers))
batches = st.integers(1, 1000)


def test_trailing_zeros_do_not_count() -> None:
    assert Extent.of(3, 0, 0) == Extent.of(3)
    assert Extent.of(0, 0) == Extent.of()


def test_an_extent_without_batch_is_constant() -> None:
    assert constant(7).is_constant
    assert constant(0).is_constant
    assert not BATCH.is_constant


def test_the_value_at_a_batch_is_that_of_the_polynomial() -> None:
    assert Extent.of(2, 3, 5).at(10) == 2 + 30 + 500


@given(extents, extents, batches)
def test_arithmetic_agrees_with_that_of_the_values(a: Extent, b: Extent, batch: int) -> None:
    assert (a + b).at(batch) == a.at(batch) + b.at(batch)
    assert (a - b).at(batch) == a.at(batch) - b.at(batch)
    assert (a * b).at(batch) == a.at(batch) * b.at(batch)


@given(extents, extents)
def test_a_product_divided_by_one_factor_is_the_other(a: Extent, b: Extent) -> None:
    if b != constant(0):
        assert (a * b).divided_by(b) == a


@pytest.mark.parametrize(
    ("dividend", "divisor"),
    [
        (constant(7), constant(2)),
        (constant(7), constant(0)),
        (BATCH, Extent.of(0, 2)),
        (BATCH + ONE, BATCH),
        (constant(6), BATCH),
    ],
)
def test_there_is_no_quotient_without_whole_coefficients(dividend: Extent, divisor: Extent) -> None:
    assert dividend.divided_by(divisor) is None


@given(extents, extents)
def test_the_order_is_that_of_the_values_for_large_batches(a: Extent, b: Extent) -> None:
    large = 10**4  # far beyond the roots of polynomials with coefficients up to 18
    assert (a < b) == (a.at(large) < b.at(large))
    assert (a >= b) == (a.at(large) >= b.at(large))


@given(st.lists(extents, max_size=4), batches)
def test_the_number_of_elements_is_the_product_of_the_sizes(
    shape: list[Extent], batch: int
) -> None:
    assert numel(tuple(shape)).at(batch) == prod(size.at(batch) for size in shape)
    assert numel(tuple(shape)) == reduce(lambda a, b: a * b, shape, ONE)


@pytest.mark.parametrize(
    ("extent", "text"),
    [
        (constant(0), "0"),
        (constant(12), "12"),
        (BATCH, "B"),
        (Extent.of(1, 2), "2·B + 1"),
        (Extent.of(0, 0, 3), "3·B^2"),
        (Extent.of(-1, 1), "B + -1"),
    ],
)
def test_an_extent_prints_with_the_highest_power_first(extent: Extent, text: str) -> None:
    assert str(extent) == text
