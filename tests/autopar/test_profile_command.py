"""`autopar profile`, and what `autopar plan --profile` makes of it, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.planner.profile.measured import read_measurements
from tests.autopar.commands import Autopar, Ran
from tests.planner.subjects import ZOO

MNIST = str(ZOO / "mnist.py")


@pytest.fixture(autouse=True)
def nobody_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def profiled(autopar: Autopar, *more: str) -> Ran:
    return autopar(
        "profile", MNIST, "--precision", "fp32", "--budget", "1", "-o", "m.toml", *more
    )  # fmt: skip


def test_profile_writes_a_file_that_plan_takes_its_times_from(
    autopar: Autopar, tmp_path: Path
) -> None:
    ran = profiled(autopar, "--batch", "4", "--batch", "8", "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    measured = read_measurements(tmp_path / "m.toml")
    assert told["measured_ops"] == len(measured.ops) > 6
    assert told["left_out"] == []
    planned = autopar(
        "plan", MNIST, "--gpus", "1", "--device", told["hosts"][0]["device"], "--precision",
        "fp32", "--global-batch", "8", "--pin", "microbatch=8", "--profile", "m.toml", "--json",
    )  # fmt: skip
    assert planned.code == 0, planned.err
    terms = {one["name"]: one for one in json.loads(planned.out)["prediction"]["terms"]}
    assert terms["compute"]["provenance"] == "measured"
    assert terms["optimizer"]["provenance"] == "measured"
    assert "note: " not in planned.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--device", "h100-sxm", "--precision", "fp32"), "the plan is for h100-sxm in fp32"),
        (("--device", "cpu", "--precision", "bf16"), "the plan is for cpu in bf16"),
    ],
)
def test_a_profile_that_has_nothing_of_a_plan_is_noted(
    autopar: Autopar, options: tuple[str, ...], told: str
) -> None:
    profiled(autopar, "--batch", "8")
    rows = ("--global-batch", "8", "--pin", "microbatch=8")
    planned = autopar("plan", MNIST, "--gpus", "1", *options, *rows, "--profile", "m.toml")
    assert planned.code == 0, planned.err
    assert planned.err.startswith("note: the profile has ops on cpu in fp32, ")
    assert f"{told}: formulas price the plan's ops" in planned.err


def test_profiling_again_adds_to_the_file(autopar: Autopar, tmp_path: Path) -> None:
    profiled(autopar, "--batch", "2")
    few = len(read_measurements(tmp_path / "m.toml").ops)
    ran = profiled(autopar, "--batch", "3", "--tensor", "1,2")
    assert len(read_measurements(tmp_path / "m.toml").ops) > 2 * few
    assert "Written: m.toml" in ran.out


def test_a_file_that_holds_something_else_is_not_written_over(
    autopar: Autopar, tmp_path: Path
) -> None:
    (tmp_path / "m.toml").write_text("[[nodes]]\n", encoding="utf-8")
    ran = profiled(autopar)
    assert ran.code == 2
    assert "holds no measurements" in ran.err
    assert (tmp_path / "m.toml").read_text(encoding="utf-8") == "[[nodes]]\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--tensor", "two"), "lists no tensor degrees"),
        (("--tensor", "0"), "lists no tensor degrees"),
        (("--precision", "fp7"), "is not one of"),
        (("--budget", "0"), "is out of range"),
        (("--budget", "nan"), "is out of range"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    autopar: Autopar, options: tuple[str, ...], told: str
) -> None:
    ran = autopar("profile", MNIST, *options)
    assert ran.code == 2
    assert told in ran.err


def test_plan_refuses_a_profile_that_is_none(autopar: Autopar, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("format = 1", encoding="utf-8")
    for name in ("m.toml", "none.toml"):
        ran = autopar("plan", MNIST, "--gpus", "1", "--device", "cpu", "--profile", name)
        assert ran.code == 2
        assert name in ran.err
