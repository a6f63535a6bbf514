"""What a schedule is told of a stage."""

from __future__ import annotations

import pytest

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.steps.stage_load import stage_load
from tests.planner.costs.step_factories import layer

SPLIT = layer()  # 1, and 1 + 1 ms


def seconds_of(*layers: LayerCost, splits: bool = True) -> StageSeconds:
    """Return what a stage of these layers takes, if waits and actions take something too."""
    return stage_load(layers).stage_seconds(
        forward_more=10e-3, backward_more=20e-3, action_seconds=0.01e-3, splits=splits
    )


def test_waits_and_an_action_make_both_passes_longer() -> None:
    one = seconds_of(SPLIT, SPLIT)
    assert one.forward_seconds == pytest.approx(12.01e-3)
    assert one.backward_seconds == pytest.approx(24.01e-3)


def test_halves_share_a_backward_and_are_called_each() -> None:
    one = seconds_of(SPLIT, SPLIT)
    assert one.input_gradient_seconds == pytest.approx(24.01e-3 - 2e-3)
    assert one.weight_gradient_seconds == pytest.approx(2e-3 + 0.01e-3)
    assert one.split_seconds == pytest.approx(0.01e-3)


def test_a_stage_that_is_not_called_for_halves_makes_all_gradients_at_once() -> None:
    one = seconds_of(SPLIT, splits=False)
    assert one.input_gradient_seconds == one.backward_seconds
    assert one.weight_gradient_seconds == one.split_seconds == 0.0


def test_a_stage_that_computes_again_does_not_split_but_is_called_twice() -> None:
    one = seconds_of(SPLIT, layer(recompute_seconds=1e-3))
    assert one.input_gradient_seconds == one.backward_seconds
    assert one.weight_gradient_seconds == pytest.approx(0.01e-3)
