"""`autopar doctor` tells what is here, and what is missing with what to do."""

from __future__ import annotations

import json

import pytest
import torch

from autopar.commands.doctor import examine
from autopar.planner.programs.solver import SolverError
from tests.autopar.commands import Autopar

MonkeyPatch = pytest.MonkeyPatch
CaptureFixture = pytest.CaptureFixture


def test_a_machine_that_runs_these_tests_is_fine(autopar: Autopar) -> None:
    done = autopar("doctor")
    assert done.code == 0, done.err
    for word in ("Python", "torch", "gloo", "HiGHS"):
        assert word in done.out


def test_json_has_every_finding(autopar: Autopar) -> None:
    found = json.loads(autopar("doctor", "--json").out)
    names = ["Python", "torch", "GPUs", "process groups", "solver", "cache"]
    assert [one["name"] for one in found] == names


def test_an_old_torch_is_told_with_what_to_do(autopar: Autopar, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    (finding,) = [one for one in examine() if one.name == "torch"]
    assert not finding.is_fine
    assert "torch>=2.11" in finding.fix
    assert autopar("doctor").code == 1


@pytest.mark.parametrize(("version", "told"), [("2.12.1", "2.13"), ("3.0.0+cu140", "verify")])
def test_what_a_torch_cannot_do_or_nobody_has_tried_is_told(
    monkeypatch: MonkeyPatch, version: str, told: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    (finding,) = [one for one in examine() if one.name == "torch"]
    assert finding.is_fine
    assert told in finding.fix


def test_a_solver_that_breaks_is_told(monkeypatch: MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise SolverError("it broke")

    monkeypatch.setattr("autopar.planner.programs.solver.solve", broken)
    (finding,) = [one for one in examine() if one.name == "solver"]
    assert (finding.is_fine, finding.fix) == (False, "pip install highspy")
