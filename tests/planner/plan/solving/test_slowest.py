"""Tests of what layers cost a group of unlike devices."""

from __future__ import annotations

from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.solving.costing import slowest
from tests.planner.costs.step_factories import layer

QUICK_BACK = layer(forward_seconds=5e-3, backward_seconds=8e-3, weight_gradient_seconds=2e-3)
QUICK_FORTH = layer(forward_seconds=4e-3, backward_seconds=10e-3, weight_gradient_seconds=5e-3)


def row(*costs: object) -> tuple[dict[Recompute, object], ...]:
    return tuple(dict.fromkeys(Recompute, cost) for cost in costs)


def test_each_pass_waits_for_the_device_that_is_slowest_in_it() -> None:
    (modes,) = slowest([row(QUICK_BACK), row(QUICK_FORTH)])  # type: ignore[list-item]
    cost = modes[Recompute.NONE]
    assert (cost.forward_seconds, cost.backward_seconds) == (5e-3, 10e-3)
    # the inputs' gradients: 8 − 2 = 6 ms on one, 10 − 5 = 5 ms on the other
    assert cost.backward_seconds - cost.weight_gradient_seconds == 6e-3


def test_the_order_of_devices_changes_nothing() -> None:
    rows = [row(QUICK_BACK), row(QUICK_FORTH)]
    first, last = (slowest(one)[0][Recompute.FULL] for one in (rows, rows[::-1]))  # type: ignore[arg-type]
    assert first == last


def test_equal_layers_stay_one_object() -> None:
    alike, other = ({mode: layer() for mode in Recompute} for _ in range(2))
    found = slowest([(alike, alike, other), (other, other, alike)])
    assert found[0] is found[1]
    assert found[0] is not found[2]
