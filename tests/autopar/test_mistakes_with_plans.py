"""Mistakes with plan.json, with the script, and with the commands that read them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.files.document import write_plan
from autopar.planning import make_plan
from tests.autopar.mistakes import MODEL, Commit, Mistake, Tell, mistake

Files = Mapping[str, str]
READERS = ("explain", "emit", "verify", "dryrun")
PINS = ("tp=2",)
DEMANDS = {"global_batch": "8", "precision": "fp32"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return model.py, plan.json and train.py of a small model on two processes."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        constraints = gathered_constraints(PINS, DEMANDS, None)
        plan = make_plan(
            "model.py", (), choose_cluster(2, "cpu"), constraints, time_limit_seconds=None
        )
        write_plan(plan, Path("plan.json"))
        write_script(plan, Path())
    return {
        name: (folder / name).read_text(encoding="utf-8")
        for name in ("model.py", "plan.json", "train.py")
    }


NO_PLANS = {
    "a misspelt plan": mistake("plna.json", "the plan cannot be read … did you mean plan.json?"),
    "the model for the plan": mistake(
        "model.py", "model.py is a Python file, not a plan … did you mean plan.json?"
    ),
    "a folder without a plan": mistake(
        "empty",
        "the plan cannot be read … at: empty/plan.json … autopar plan MODEL",
        files={"empty/notes.txt": ""},
    ),
    "a plan that is cut off": mistake(
        "cut.json",
        "damaged or cut off … cut.json, line 1 … plan again",
        files={"cut.json": '{"format": 1, "autopar'},
    ),
    "another program's file": mistake(
        "other.json", "this JSON file is not a plan", files={"other.json": '{"mine": 1}'}
    ),
    "a plan of a later autopar": mistake(
        "later.json",
        "autopar 9.0 wrote this plan in format 99 … update autopar",
        files={"later.json": '{"format": 99, "autopar": "9.0"}'},
    ),
    "bytes": mistake(
        "bytes.json", "the plan is no text in UTF-8", files={"bytes.json": b"\xff\xfe\x00"}
    ),
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("mistake", NO_PLANS.values(), ids=NO_PLANS)
def test_what_is_no_plan_is_told_by_every_command_that_reads_one(
    tell: Tell, planned: Files, *, command: str, mistake: Mistake
) -> None:
    wrong = Mistake(
        arguments=(command, *mistake.arguments),
        files={**planned, **mistake.files},
        telling=mistake.telling,
    )
    tell(wrong)


IN_THE_WAY = "the script would replace the file that it is made from"
MISTAKES = {
    "diff of a plan and a model": mistake("diff plan.json model.py", "model.py is a Python file"),
    "diff of one plan": mistake(
        "diff plan.json", "B is missing … expected: plan.json or its folder … autopar diff A B"
    ),
    "a stage that is not there": mistake(
        "explain plan.json --stage 1", "there is no stage 1 … 0 to 0"
    ),
    "a question without a value": mistake("explain plan.json --why-not tp", "--why-not dp=2,tp=4"),
    "a rank that is not there": mistake("dryrun plan.json --rank 2", "there is no rank 2 … 0 to 1"),
    "all ranks": mistake("dryrun plan.json --rank all", "'all' is not a whole number … at: --rank"),
    "no steps": mistake("verify plan.json --steps 0", "'0' is out of range … at: --steps"),
    "a script that is not there": mistake(
        "verify plan.json --script gone.py",
        "there is no script to verify … at: gone.py … autopar emit",
    ),
    "a script that is none": mistake(
        "verify plan.json --script model.py",
        "the script has no function main and no train_step … model.py",
    ),
    "a script that is cut off": mistake(
        "verify plan.json --script cut.py",
        "the script is no Python … cut.py, line 1",
        files={"cut.py": "def main(:"},
    ),
    "a tolerance below nothing": mistake(
        "verify plan.json --tolerance -1", "'-1' is out of range … at: --tolerance"
    ),
    "a script over the model": mistake("emit plan.json -o model.py --force", IN_THE_WAY),
    "a script over the plan": mistake("emit plan.json -o plan.json --force", IN_THE_WAY),
    "a script over a folder": mistake(
        "emit plan.json -o folder", "folder is a folder, not a file", files={"folder/notes.txt": ""}
    ),
    "a standalone folder over a file": mistake(
        "emit plan.json --standalone -o model.py", "model.py is a file, not a folder"
    ),
    "a standalone folder that holds a file named autopar": mistake(
        "emit plan.json --standalone -o folder",
        "folder/autopar is a file, not a folder",
        files={"folder/autopar": ""},
    ),
    "measurements over a folder": mistake(
        "profile model.py -o folder",
        "folder is a folder, not a file",
        files={"folder/notes.txt": ""},
    ),
    "measurements over the model": mistake(
        "profile model.py -o model.py", "the measurements are damaged … at: model.py"
    ),
    "an argument for doctor": mistake("doctor model.py", "unexpected extra argument"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_with_a_plan_is_told(tell: Tell, planned: Files, *, mistake: Mistake) -> None:
    wrong = Mistake(
        arguments=mistake.arguments, files={**planned, **mistake.files}, telling=mistake.telling
    )
    tell(wrong)


RUNS = 'from pathlib import Path\nPath("ran").write_text("")\n'


@pytest.mark.parametrize("command", ["emit", "verify", "dryrun"])
def test_a_model_that_is_gone_or_has_changed_is_told_and_not_imported(
    tell: Tell, planned: Files, *, command: str
) -> None:
    gone = Mistake(
        arguments=(command, "plan.json"),
        files={"plan.json": planned["plan.json"]},
        telling=(
            "the plan is for model.py, which is neither here nor beside the plan",
            "--model PATH",
        ),
    )
    tell(gone)
    changed = Mistake(
        arguments=(command, "plan.json"),
        files={**planned, "model.py": RUNS + planned["model.py"]},  # a new file is refused, too
        telling=("has changed since it was planned for", "plan again"),
        code=6,
    )
    tell(changed)


@pytest.mark.parametrize("command", ["emit", "verify", "dryrun"])
@pytest.mark.parametrize("path", ["../model.py", "{}/model.py"])
def test_a_path_out_of_the_plan_s_folder_is_followed_only_where_it_is_given(
    tell: Tell, tmp_path: Path, planned: Files, *, command: str, path: str
) -> None:
    (tmp_path / "model.py").write_text(planned["model.py"], encoding="utf-8")
    (tmp_path / "plan").mkdir()
    named = f'"spec": "{path.format(tmp_path)}"'
    plan = planned["plan.json"].replace('"spec": "model.py"', named)
    assert named in plan
    outside = Mistake(
        arguments=(command, "plan.json"),
        files={"plan.json": plan, "train.py": planned["train.py"]},
        telling=("lies neither here nor beside the plan", f"--model {tmp_path}/model.py"),
    )
    tell(outside, tmp_path / "plan")


def test_a_model_that_has_moved_is_given(
    commit: Commit, tell: Tell, tmp_path: Path, planned: Files
) -> None:
    (tmp_path / "model.py").write_text(planned["model.py"], encoding="utf-8")
    given = mistake(
        "emit plan.json --model ../model.py --check",
        files={"plan.json": planned["plan.json"], "train.py": planned["train.py"]},
    )
    (tmp_path / "plan").mkdir()
    ran = commit(given, tmp_path / "plan")
    assert (ran.code, ran.err) == (1, "")  # the path of the model file is another
    gone = mistake(
        "emit plan.json --model gone.py", "the plan is for gone.py, which is neither here"
    )
    tell(gone, tmp_path / "plan")


def test_a_model_that_this_machine_cannot_train_is_refused_before_it_is_tried(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, planned: Files
) -> None:
    parameters = 4 * 8 + 8 + 3 * (8 * 8 + 8)  # embed and three blocks
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": parameters, "SC_PHYS_PAGES": 31}.get)
    large = mistake(
        "verify plan.json",
        "to train model in float64, and this machine has … a small model … --arg",
        files=planned,
    )
    tell(large)


def test_a_script_of_bytes_is_not_the_one_of_the_plan(commit: Commit, planned: Files) -> None:
    check = mistake("emit . --check", files={**planned, "train.py": b"\xff\xfe"})
    ran = commit(check)
    assert (ran.code, ran.err) == (1, "")
    assert "train.py is not the script of this plan" in ran.out
