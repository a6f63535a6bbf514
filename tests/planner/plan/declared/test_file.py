"""Constraints files are read with their lines, and faults in them are told with theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import (
    MemoryLimit,
    Objective,
    RecomputePin,
    SplitRule,
    StagePin,
    constraints_of,
)
from autopar.planner.plan.declared.file import (
    gathered_constraints,
    parse_constraints,
    read_constraints,
)
from autopar.planner.plan.declared.settings import SETTINGS, example_file
from autopar.planner.plan.search.space import legal_degrees
from autopar.planner.precision import Compression, Precision

DOCS = Path(__file__).parents[4] / "docs" / "constraints-file.md"


def example() -> str:
    found = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_the_example_of_the_docs_says_what_its_comments_say() -> None:
    constraints = constraints_of(parse_constraints(example(), where="docs"))
    assert constraints.objective is Objective.STEP_TIME
    assert constraints.global_batch == 512
    assert constraints.precision is Precision.BF16
    assert legal_degrees(8, constraints) == ((2, 2, 2),)  # so that it can be tried as it stands
    assert (constraints.max_pipeline, constraints.max_data, constraints.max_tensor) == (8, 64, 8)
    assert constraints.memory == MemoryLimit(size_bytes=70 * 2**30)
    assert constraints.zero_levels == (Zero.OPTIMIZER,)
    assert constraints.schedules == (ScheduleKind.ONE_F_ONE_B,)
    assert constraints.compression == (Compression.NONE, Compression.HALF)
    assert constraints.bucket_bytes == (25 * 2**20, 100 * 2**20)
    assert constraints.splits == (SplitRule(modules="lm_head", axis="vocab", is_required=False),)
    assert constraints.stages == (StagePin(modules="wte", stage=0),)
    assert constraints.recompute == (RecomputePin(modules="h.*", mode=Recompute.FULL),)


def test_the_docs_show_every_demand_as_the_table_has_it() -> None:
    assert example().startswith(f"{example_file()}\n\n[[splits]]")
    shown = {one.place for one in parse_constraints(example(), where="docs")}
    assert set(SETTINGS) <= shown


def test_a_declaration_knows_its_line() -> None:
    text = 'precision = "bf16"\n\n[pins]\ntp = 2\n\n[[stages]]\nmodules = "a"\nstage = 1\n'
    origins = [one.origin for one in parse_constraints(text, where="c.toml")]
    assert origins == ["c.toml, line 1", "c.toml, line 4", "c.toml, line 6"]


@pytest.mark.parametrize(
    ("text", "telling", "place"),
    [
        ("[pins]\ntp = 2\npt = 2", "did you mean 'tp'", "line 3"),
        ("[pin]\ntp = 2", "did you mean 'pins'", "line 1"),
        ("preicsion = 'bf16'", "did you mean 'precision'", "line 1"),
        ("precision = 'fp8'", "one of fp32, tf32, bf16", "line 1"),
        ("objective = 'speed'", "one of step-time, memory, cost", "line 1"),
        ("[pins]\ntp = 0", "0 is not a count", "line 2"),
        ("[pins]\ntp = true", "True is not a count", "line 2"),
        ("[pins]\ntp = 2.5", "2.5 is not a count", "line 2"),
        ("[pins]\ntp = 2\ntp = 4", "not a valid TOML file", "c.toml"),
        ("pins = 3", "3 is not a table", "c.toml"),
        ("[limits]\nmemory = 70", "70 has no unit", "line 2"),
        ("[limits]\nmemory = '70 GiBB'", "unknown unit 'GiBB'", "line 2"),
        ("[limits]\nmemory = '110%'", "'110%' is not a share", "line 2"),
        ("[limits]\nmemory = 'nan%'", "'nan%' is not a share", "line 2"),
        ("[choices]\nzero = 1", "1 is not a list", "line 2"),
        ("[choices]\nzero = []", "[] is not a list", "line 2"),
        ("[choices]\nzero = [4]", "4 is not a ZeRO level", "line 2"),
        ("[choices]\ncompressed_gradients = 'yes'", "'yes' is no choice", "line 2"),
        ("[choices]\nbucket_sizes = [25]", "25 has no unit", "line 2"),
        ("[[splits]]\nrule = 'forbid'", "'axis' is missing", "line 1"),
        ("[[splits]]\naxis = 'ffn'\nrule = 'allow'", "'allow' is not known", "line 3"),
        ("[splits]\naxis = 'ffn'", "write it as [[splits]]", "line 1"),
        ("[[stages]]\nmodules = 'a'\nstage = -1", "-1 is not a stage", "line 3"),
        ("[[stages]]\nmodules = ''\nstage = 1", "'' is not a text", "line 2"),
        ("[[recompute]]\nmodules = 'a'\nmode = 'half'", "did you mean", "line 3"),
        ("[[recompute]]\nmodules = 'a'", "'mode' is missing", "line 1"),
    ],
)
def test_a_fault_is_told_with_its_line(text: str, telling: str, place: str) -> None:
    if telling == "did you mean" and "half" in text:
        telling = "one of none, selective, full, chunked"
    with pytest.raises(InputError) as raised:
        parse_constraints(text, where="c.toml")
    assert telling in str(raised.value)
    assert place in raised.value.where


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_constraints(tmp_path / "c.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_constraints(tmp_path)
    (tmp_path / "c.toml").write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        read_constraints(tmp_path / "c.toml")


def test_the_command_line_holds_against_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('precision = "fp32"\n[pins]\ntp = 2\n[limits]\ntp = 4\nmemory = "90%"\n')
    constraints = gathered_constraints(
        ["tp=4"], {"memory": "70 GiB", "max_tp": None, "precision": "bf16"}, file
    )
    assert constraints.tensor == 4
    assert constraints.max_tensor == 4
    assert constraints.memory == MemoryLimit(size_bytes=70 * 2**30)
    assert constraints.precision is Precision.BF16
    assert [str(one) for one in constraints.declared] == [
        "precision bf16 (--precision)",
        "tp=4 (--pin)",
        f"at most tp=4 ({file}, line 5)",
        "at most 70 GiB a device (--memory)",
    ]
