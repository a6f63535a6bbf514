"""Garbage is collected after steps that all ranks know."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.runtime.checkpointing.signals import EVERY_STEPS, Garbage
from tests.runtime.processes import FREEZE, FREEZE_COUNT, UNFREEZE


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    made = Garbage()
    made.begin(0)
    yield made
    made.end()


def cycle() -> list[Any]:
    found: list[Any] = [torch.ones(1)]
    found.append(found)
    return found


def collections(garbage: Garbage, steps: int, *, leaves_cycles: bool = False) -> list[int]:
    """Return the steps after which Python looks for cycles."""
    found: list[int] = []
    step = 0

    def note(phase: str, _: Any) -> None:
        if phase == "start":
            found.append(step)

    gc.callbacks.append(note)
    for step in range(1, steps + 1):
        [[object()] for _ in range(5000)]  # enough for Python to look by itself
        if leaves_cycles:
            cycle()
        garbage.after(step)
    gc.callbacks.remove(note)
    return found


def test_garbage_is_collected_after_so_many_steps_and_at_no_other_time(garbage: Garbage) -> None:
    steps = 2 * EVERY_STEPS
    assert collections(garbage, steps) == [1, 2, EVERY_STEPS, steps]


def test_garbage_is_collected_after_each_step_if_cycles_hold_tensors(garbage: Garbage) -> None:
    assert collections(garbage, 4, leaves_cycles=True) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_python_collects_garbage_by_itself_after_the_training(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    monkeypatch.setattr(gc, "get_freeze_count", FREEZE_COUNT)
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    garbage = Garbage()
    garbage.begin(0)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    garbage.end()
    assert gc.isenabled()
    assert bool(gc.get_freeze_count()) == is_frozen
