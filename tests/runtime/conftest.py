"""The mesh of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.runtime.ranks.mesh import Mesh, start, stop


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = start(pipeline=1, data=1, tensor=1)
    yield made
    stop(made)
