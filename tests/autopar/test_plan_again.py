"""A plan is made anew where its script could not run a layer again."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.script.layer_lists import LostLayersError
from autopar.commands.plan import make_plan, scripted_plan
from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.declared.constraints import Constraints, constraints_of
from autopar.planner.plan.declared.file import parse_constraints
from autopar.planner.plan.plan import Plan
from tests.field.cells import KINDS, SUBJECTS
from tests.field.trial import cluster_of
from tests.field.trial import constraints_of as demanded

SUBJECT, KIND = SUBJECTS["odd modules"], KINDS["pp 2"]
EVERYWHERE = parse_constraints("[[recompute]]\nmodules = '*'\nmode = 'full'\n", where="rules.toml")


def planned(constraints: Constraints) -> Plan:
    spec, arguments = str(SUBJECT.path), SUBJECT.arguments
    return make_plan(spec, arguments, cluster_of(KIND), constraints, time_limit_seconds=None)


def planned_as_if_memory_pressed(constraints: Constraints) -> Plan:
    """Return the plan with everything recomputed but what the constraints name."""
    return planned(constraints_of((*EVERYWHERE, *constraints.declared)))


def test_layers_whose_code_stands_elsewhere_are_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demands = demanded(SUBJECT, KIND)
    plan, script = scripted_plan(planned_as_if_memory_pressed, demands, tmp_path / "train.py")
    assert set(plan.layer_modes) == {Recompute.NONE, Recompute.FULL}
    assert '"biased"' not in script.partition("RECOMPUTED = (")[2].partition(")")[0]
    assert "planned again without recomputing biased" in capsys.readouterr().err


def test_what_a_rule_wants_is_refused_as_ever(tmp_path: Path) -> None:
    demands = demanded(SUBJECT, KIND)
    wanted = constraints_of((*EVERYWHERE, *demands.declared))
    with pytest.raises(LostLayersError, match="'biased'"):
        scripted_plan(planned, wanted, tmp_path / "train.py")
