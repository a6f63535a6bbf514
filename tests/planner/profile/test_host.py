"""What the host is measured to add."""

import pytest

from autopar.planner.profile.net import typical


def test_a_typical_block_is_neither_the_luckiest_nor_a_hiccup() -> None:
    assert typical([0.0, *[1.0] * 4, *[2.0] * 4, 100.0]) == pytest.approx(1.5)
    assert typical([3.0]) == 3.0
