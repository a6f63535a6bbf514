"""The golden scripts are what is emitted now; `make golden` remakes them."""

from __future__ import annotations

import pytest

from tests.codegen.golden.scripts import GOLDEN, golden_path, script_of


def test_a_data_parallel_script_is_short() -> None:
    assert len(golden_path("resnet50_dp").read_text(encoding="utf-8").splitlines()) <= 190


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_script_is_what_is_emitted_now(name: str) -> None:
    found = script_of(name)
    # Compared by lines: a whole script in an assertion would hide what differs.
    assert found.splitlines() == golden_path(name).read_text(encoding="utf-8").splitlines()
