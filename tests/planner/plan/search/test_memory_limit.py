"""A limit of memory is refused where no device reaches it, and stands where some do."""

from __future__ import annotations

import pytest

from autopar.planner.cluster.file import parse_cluster
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.search.demands import check_memory, limits_of

GIB = 2**30
UNEQUAL = parse_cluster(
    '[[nodes]]\ndevice = "h100-sxm"\n[[nodes]]\ndevice = "a100-40gb-sxm"\n'
    '[network]\nlike = "efa2"\n',
    where="machines.toml",
)


@pytest.mark.parametrize("limit", ["60 GiB", "80 GiB", "100%"])
def test_a_limit_above_some_devices_is_that_of_the_others(limit: str) -> None:
    constraints = gathered_constraints((), {"memory": limit}, None)
    check_memory(UNEQUAL, constraints)
    assert limits_of(UNEQUAL, constraints)["a100-40gb-sxm"] == 40 * GIB


def test_without_a_limit_each_device_keeps_what_measured_runs_took_more_than_predicted() -> None:
    assert limits_of(UNEQUAL, Constraints()) == {
        "h100-sxm": int(0.86 * 80 * GIB),
        "a100-40gb-sxm": int(0.86 * 40 * GIB),
    }
    closer = gathered_constraints((), {"memory": "95%"}, None)
    assert limits_of(UNEQUAL, closer)["h100-sxm"] == 76 * GIB


def test_a_limit_above_every_device_is_refused_with_both_figures() -> None:
    constraints = gathered_constraints((), {"memory": "81 GiB"}, None)
    with pytest.raises(InputError, match="81 GiB for each device, and h100-sxm has 80 GiB"):
        check_memory(UNEQUAL, constraints)
