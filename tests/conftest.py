"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

# Tests that run on many processes at once. Two of them side by side take ten times as long on two
# cores, so they form one group, which `pytest --dist loadgroup` gives to one worker.
ON_MANY_PROCESSES = (
    "tests/runtime/",
    "tests/codegen/forward/test_ranks.py",
    "tests/codegen/test_equality.py",
    "tests/codegen/test_equality_matrix.py",
    "tests/codegen/test_run.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests on many processes together."""
    for item in items:
        if item.nodeid.startswith(ON_MANY_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("many-processes"))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """End the process group that a test made in its own process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
