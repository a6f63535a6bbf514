"""A plan is made anew where its script could not run a layer again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import planning
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import LostLayersError
from autopar.planner.plan.declared.constraints import Declared, constraints_of
from autopar.planner.plan.declared.file import parse_constraints
from autopar.planner.plan.planned import Planned
from autopar.planning import Request, scripted
from tests.field.cells import KINDS, SUBJECTS
from tests.field.trial import cluster_of
from tests.field.trial import constraints_of as demanded

SUBJECT, KIND = SUBJECTS["odd modules"], KINDS["pp 2"]
EVERYWHERE = parse_constraints("[[recompute]]\nmodules = '*'\nmode = 'full'\n", where="rules.toml")


def request(*, rules: Sequence[Declared] = ()) -> Request:
    return Request(
        model=str(SUBJECT.path),
        arguments=tuple(SUBJECT.arguments),
        clusters=(cluster_of(KIND),),
        constraints=constraints_of((*rules, *demanded(SUBJECT, KIND).declared)),
    )


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything recomputed but what the constraints name, as if memory were short."""
    plain = planning.make_plans

    def planned(request: Request, **_: object) -> Planned:
        rules = constraints_of((*EVERYWHERE, *request.constraints.declared))
        return plain(replace(request, constraints=rules))

    monkeypatch.setattr(planning, "make_plans", planned)


@pytest.mark.usefixtures("pressed")
def test_layers_whose_code_stands_elsewhere_are_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, script = scripted(request(), tmp_path / "train.py")
    assert set(found.plan.layer_modes) == {Recompute.NONE, Recompute.FULL}
    assert '"biased"' not in script.partition("RECOMPUTED = (")[2].partition(")")[0]
    assert "planned again without recomputing biased" in capsys.readouterr().err


@pytest.mark.usefixtures("pressed")
def test_layers_that_were_lost_before_are_known_without_printing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    first = scripted(request(), tmp_path / "train.py")
    monkeypatch.setattr("autopar.codegen.emit.emit_with_notes", None)
    again = scripted(request(), tmp_path / "train.py")
    assert again[1] == first[1]


def test_what_a_rule_wants_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(LostLayersError, match="'biased'"):
        scripted(request(rules=EVERYWHERE), tmp_path / "train.py")
