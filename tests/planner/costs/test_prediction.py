"""The runtime has a row for each mode that plans have, and both say the same."""

from __future__ import annotations

import pytest

from autopar.codegen.script.layer_lists import CALLS
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.runtime import recompute as runtime_recompute
from autopar.runtime import tensor
from autopar.runtime.data_parallel.buckets import LEVELS, sharding_of
from autopar.runtime.recompute.running_again import SAVED


def test_scripts_recompute_in_each_mode_that_runs_again() -> None:
    for mode in Recompute:
        calls = [CALLS[table][0] for table in mode.tables]
        names = [name for name in SAVED if f'recompute(layer, "{name}")' in calls]
        assert len(names) == mode.runs_again
        assert all((SAVED[name] is None) == (mode.saved_ops is None) for name in names)
        assert ("save_on_host(layers, mesh.device)" in calls) == mode.is_on_host


def test_the_runtime_has_what_scripts_call_for_layers_in_each_mode() -> None:
    assert {table for mode in Recompute for table in mode.tables} == set(CALLS)
    for call, _ in CALLS.values():
        name = call.partition("(")[0]
        assert hasattr(tensor, name) or hasattr(runtime_recompute, name)


@pytest.mark.parametrize("level", Zero)
def test_scripts_shard_at_each_zero_level(level: Zero) -> None:
    sharding = sharding_of(level.value)
    assert sharding.shards_modules == level.shards_modules
    assert sharding.gathers_once == level.keeps_gathered
    assert sharding.frees_after_forward == level.divides_parameters
    assert sharding.steps_parts == level.gathers_updated


def test_another_zero_level_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no ZeRO level 9: take one of \[0, 1, 2, 3\]"):
        sharding_of(9)
    assert set(LEVELS) == {level.value for level in Zero}
