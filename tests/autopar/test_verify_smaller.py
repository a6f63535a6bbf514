"""The plan of a large model is verified on a small one of the same file, under the same degrees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.commands.verify import smaller_plan, splits_of
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.again import arrangement_constraints
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.files.document import write_plan
from autopar.planner.plan.plan import Plan
from tests.autopar.commands import Autopar
from tests.codegen.plans import pinned_plan
from tests.planner.subjects import ZOO

pytestmark = pytest.mark.usefixtures("forked_python", "traced_once")
SMALL = ("layers=4", "dim=32", "heads=4", "vocab_size=64", "seq_len=16", "size=tiny")
DEGREES = {"pipeline": 2, "data": 2, "tensor": 2}


def large_plan() -> Plan:
    return pinned_plan(
        "gpt2.py",
        ("size=124m",),
        global_batch=64,
        microbatch=4,
        zero_levels=(Zero.OPTIMIZER,),
        stages_per_rank=1,
        split=("heads", "ffn"),
        recompute=(RecomputePin(modules="h.*", mode=Recompute.FULL),),
        device="h100-sxm",
        **DEGREES,
    )


def test_a_smaller_model_gets_the_degrees_splits_and_recomputation_of_the_plan() -> None:
    large = large_plan()
    small = smaller_plan(large, Path(), SMALL)
    assert splits_of(large) <= splits_of(small)
    arranged = small.arrangement
    assert replace(arranged, bucket_bytes=0) == replace(
        large.arrangement, microbatch=2, microbatches=4, bucket_bytes=0
    )
    assert set(small.layer_modes) == set(large.layer_modes)
    assert small.model.parameters < large.model.parameters / 1000
    assert dict(small.model.arguments)["dim"] == "32"


def test_what_a_smaller_model_cannot_split_so_is_told() -> None:
    large = large_plan()
    small = smaller_plan(large, Path(), (*SMALL, "heads=1"))
    assert any("along heads" in one for one in splits_of(large) - splits_of(small))


def test_fewer_layers_than_stages_are_refused_with_what_the_plan_has() -> None:
    large = pinned_plan(
        "gpt2.py",
        ("layers=4",),
        pipeline=2,
        microbatch=1,
        global_batch=2,
        schedules=(ScheduleKind.INTERLEAVED_1F1B,),
        stages_per_rank=3,
    )
    with pytest.raises(InfeasibleError) as refusal:
        smaller_plan(large, Path(), ("layers=1",))
    assert "layers for 6 stages" in str(refusal.value)


@pytest.mark.slow
def test_the_command_says_which_model_it_verified(autopar: Autopar, tmp_path: Path) -> None:
    large = pinned_plan("gpt2.py", ("layers=8",), data=2, global_batch=16, device="h100-sxm")
    write_plan(large, tmp_path / "plan.json")
    script = write_script(large, tmp_path)
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("LOG_EVERY = 10", "LOG_EVERY = 50"), encoding="utf-8")
    given = ["--model", str(ZOO / "gpt2.py")]
    given += [word for argument in SMALL for word in ("--arg", argument)]
    ran = autopar("verify", str(tmp_path), *given, "--steps", "2", "--json")
    assert ran.code == 0, ran.err
    assert "under the plan's degrees: dp 2" in ran.err
    told = json.loads(ran.out)
    assert told["is_equal"]
    assert told["arguments"]["dim"] == "32"
    assert [edit["found"][0][:14] for edit in told["edits"]] == ["LOG_EVERY = 50"]
    script.write_text(
        text.replace("mesh.data.rank", "0").replace("seed_all(options.seed, mesh)", "...")
    )
    ran = autopar("verify", str(tmp_path), *given, "--steps", "1")
    assert ran.code == 1
    assert "seed_all is missing" in ran.out


def test_each_tensor_rank_has_a_row_where_they_may_share_them() -> None:
    plan = large_plan()
    whole = replace(
        plan.arrangement, pipeline=1, data=1, shard=1, tensor=4, microbatch=64, microbatches=1
    )
    for arranged, rows in ((whole, 4), (replace(whole, microbatches=2), 2)):
        found = arrangement_constraints(replace(plan, arrangement=arranged))
        assert found.microbatch == rows
