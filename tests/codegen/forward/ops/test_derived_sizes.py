"""A number that varies with lengths is printed as arithmetic that gives it in both traces."""

from __future__ import annotations

import pytest

from autopar.codegen.forward.ops.sizes import Pair, derived
from autopar.codegen.text.expressions import Binding, Fact, LocalTensor, rendered, text

T, S = (12, 21), (7, 11)


def _name(_: LocalTensor | Fact) -> tuple[str, Binding]:
    raise AssertionError


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        pytest.param((12, 21), "t", id="a-length"),
        pytest.param((36, 63), "t * 3", id="a-multiple"),
        pytest.param((4, 7), "t // 3", id="a-part"),
        pytest.param((84, 231), "t * s", id="a-product"),
        pytest.param((288, 882), "t * t * 2", id="a-multiple-of-a-square"),
        pytest.param((6, 11), "(t + 1) // 2", id="a-part-rounded-up"),
        pytest.param((23, 41), "t * 2 - 1", id="a-multiple-less-one"),
        pytest.param((5, 10), "(t - 1) // 2", id="a-part-of-less"),
        pytest.param((12, 5), None, id="nothing-that-shrinks-as-lengths-grow"),
    ],
)
def test_the_simplest_arithmetic_that_gives_both_numbers_is_printed(
    number: Pair, printed: str | None
) -> None:
    found = derived(number, {T: text("t"), S: text("s")})
    assert (None if found is None else rendered(found, _name)[0]) == printed
