"""Hooks of a module are found, whichever way they run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_module

from autopar.planner.model.functions import (
    forward_hooks,
    global_hooks,
    has_backward_hooks,
    has_hooks,
)


def hook(*_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_of_a_forward_runs_when_its_module_is_called(kind: str) -> None:
    module = nn.Linear(2, 2)
    assert not has_hooks(module)
    getattr(module, f"register_{kind}_hook")(hook)
    assert list(forward_hooks(module)) == [hook]
    assert has_hooks(module)
    assert not has_backward_hooks(module)


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_a_hook_of_a_backward_is_told_from_those_of_forwards(kind: str) -> None:
    module = nn.Linear(2, 2)
    getattr(module, f"register_{kind}_hook")(hook)
    assert list(forward_hooks(module)) == []
    assert has_backward_hooks(module)
    assert has_hooks(module)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_of_all_modules_is_found_until_it_is_removed(kind: str) -> None:
    handle = getattr(torch_module, f"register_module_{kind}_hook")(hook)
    try:
        assert global_hooks() == [hook]
    finally:
        handle.remove()
    assert global_hooks() == []
