"""A curve has the figures of its plans, and what is chosen on it is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.errors import ExitCode, InfeasibleError, InputError
from autopar.planner.plan.declared.constraints import Constraints, Objective
from autopar.planner.plan.declared.file import check_tokens, check_work
from autopar.planner.plan.fleet import Curve, Trial, choose, curve_of, time_text
from autopar.planner.plan.plan import Plan
from tests.planner.plan.plans import prediction, small_plan
from tests.planner.plan.searches import declared

# Devices and the seconds of a step; a device costs 3.60 USD an hour, a thousandth USD a second.
STEPS = {1: 8.0, 2: 4.2, 4: 2.4, 8: 2.0, 16: 1.9}
# Cost × time of a step, n · T²: 64, 35.3, 23.0, 32, 57.8. So the knee is at 4.
KNEE, FASTEST, CHEAPEST = 4, 16, 1


def plan(devices: int, seconds: float, price: float | None = 3.6) -> Plan:
    usual = small_plan()
    hourly = None if price is None else price * devices
    machines = replace(usual.machines, devices=devices, usd_per_hour=hourly)
    return replace(usual, machines=machines, prediction=prediction(step_seconds=seconds))


def curve(constraints: Constraints, price: float | None = 3.6) -> Curve:
    trials = [
        Trial(devices=devices, plan=plan(devices, seconds, price))
        for devices, seconds in STEPS.items()
    ]
    return curve_of(trials, constraints)


def chosen(**places: object) -> int:
    constraints = declared(**places)
    return choose(curve(constraints), constraints).point.devices


def test_the_figures_of_a_curve() -> None:
    found = curve(declared(samples="1k"))
    point = found.points[2]
    batch = point.plan.arrangement.global_batch
    steps = -(-1000 // batch)
    assert [one.devices for one in found.points] == list(STEPS)
    assert point.step_seconds == pytest.approx(2.4)
    assert point.speedup == pytest.approx(8.0 / 2.4)
    assert point.efficiency == pytest.approx(8.0 / 2.4 / 4)
    assert point.units_per_second == pytest.approx(batch / 2.4)
    assert point.units_per_usd == pytest.approx(batch / 2.4 / 4 * 1000)
    assert point.training_seconds == pytest.approx(steps * 2.4)
    assert point.training_usd == pytest.approx(steps * 2.4 * 4 / 1000)


def test_speed_is_told_against_the_fewest_devices_that_have_a_plan() -> None:
    trials = [Trial(devices=1, plan=None, refusal="too large")]
    trials += [Trial(devices=count, plan=plan(count, 8.0 / count)) for count in (4, 2)]
    found = curve_of(trials, declared())
    assert [one.devices for one in found.trials] == [1, 2, 4]
    assert [one.devices for one in found.points] == [2, 4]
    assert [one.efficiency for one in found.points] == pytest.approx([1.0, 1.0])


def test_the_knee_the_fastest_and_the_cheapest() -> None:
    found = curve(declared())
    assert found.knee.devices == KNEE
    assert found.best(Objective.STEP_TIME).devices == FASTEST
    assert found.best(Objective.COST).devices == CHEAPEST
    without_price = curve(declared(), price=None)
    assert without_price.knee.devices == KNEE
    assert without_price.points[0].units_per_usd is None


def test_points_with_and_without_a_price_are_compared_by_devices() -> None:
    # 8.0 s on one device for 3.6 USD an hour, 4.2 s on two of which one has no price: 8.0 < 8.4
    trials = [
        Trial(devices=1, plan=plan(1, 8.0)),
        Trial(devices=2, plan=plan(2, 4.2, price=None)),
    ]
    assert curve_of(trials, declared()).best(Objective.COST).devices == 1


def test_at_the_knee_shorter_steps_cost_as_much_as_they_save() -> None:
    """Where T = n^-a + b is smooth, the knee is where a step 1 % shorter costs 1 % more."""
    steps = {count: 1 / count + 0.02 for count in range(1, 100)}
    trials = [Trial(devices=count, plan=plan(count, one)) for count, one in steps.items()]
    knee = curve_of(trials, declared()).knee.devices
    # n (1/n + c)² is least at n = 1/c: 50. There d(n T) / (n T) = −dT / T.
    assert knee == 50


@pytest.mark.parametrize(
    ("places", "devices"),
    [
        ({}, KNEE),
        ({"objective": "step-time"}, FASTEST),
        ({"objective": "cost"}, CHEAPEST),
        ({"samples": "1k"}, KNEE),
        # 63 steps of 16 rows: 504, 264.6, 151.2, 126 and 119.7 s; 0.50, 0.53, 0.60, 1.0, 1.9 USD.
        ({"samples": "1k", "deadline": "300s"}, 2),
        ({"samples": "1k", "deadline": "2min"}, 16),
        ({"samples": "1k", "deadline": "300s", "objective": "step-time"}, 16),
        ({"samples": "1k", "budget": "0.7"}, 4),
        ({"samples": "1k", "budget": 5}, 16),
        ({"samples": "1k", "budget": 5, "objective": "cost"}, 1),
        ({"samples": "1k", "budget": "1.5", "deadline": "140s"}, 8),
    ],
)
def test_the_number_of_devices_is_chosen_by_what_is_asked(
    places: dict[str, object], devices: int
) -> None:
    assert small_plan().arrangement.global_batch == 16
    assert chosen(**places) == devices


@pytest.mark.parametrize(
    ("places", "telling"),
    [
        ({"deadline": "100s"}, "in 1.67 min: 16 devices are the fastest of the numbers asked for,"),
        ({"budget": "0.1"}, "is the cheapest of the numbers asked for, and costs 0.504 USD"),
        ({"budget": "0.5", "deadline": "300s"}, "devices that meets the deadline trains"),
    ],
)
def test_what_no_number_of_devices_can_do_is_refused(
    places: dict[str, object], telling: str
) -> None:
    with pytest.raises(InfeasibleError) as raised:
        chosen(samples=1000, **places)
    assert telling in raised.value.found
    assert raised.value.exit_code is ExitCode.INFEASIBLE


def test_a_budget_for_devices_without_a_price_is_refused() -> None:
    constraints = declared(samples=1000, budget=5)
    with pytest.raises(InputError, match="no price of h100-sxm is known"):
        choose(curve(constraints, price=None), constraints)


def test_work_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(InputError, match="both say how much"):
        check_work(declared(samples=1, tokens=1))
    with pytest.raises(InputError, match="rows are no sequences"):
        check_tokens(declared(tokens="10B"), tokens_per_row=1)
    check_tokens(declared(tokens="10B"), tokens_per_row=512)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(30.0, "30 s"), (119.7, "2 min"), (5400.0, "1.5 h"), (86400.0 * 3, "3 days")],
)
def test_times_are_told_as_people_do(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
