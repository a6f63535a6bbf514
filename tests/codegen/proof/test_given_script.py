"""A script is read as it lies there, and what was changed in it is known."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autopar.codegen.proof.script_rank import imported
from autopar.codegen.proof.verification import carried_over, edits_of, read_script
from autopar.planner.errors import InputError
from autopar.planner.plan.telling.words import AdamWDefaults

EMITTED = """# Written by autopar 0.1.0: 12
SEED = 0  # of weights
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)  # of AdamW
WIDTH = 512


def train_step():
    sum_gradients()
    step()


def main():
    train_step()
"""
SMALLER = EMITTED.replace("512", "64")


def test_lines_that_differ_are_told_by_their_numbers() -> None:
    edited = EMITTED.replace("    sum_gradients()\n", "").replace("12\n", "34\n", 1)
    (edit,) = edits_of(edited, EMITTED)
    assert (edit.line, edit.emitted, edit.found) == (9, ("    sum_gradients()",), ())
    assert edits_of(EMITTED, EMITTED) == ()


def test_settings_of_the_script_are_those_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    edited = EMITTED.replace("SEED = 0", "SEED = 7").replace("1.0\n", "None\n")
    path.write_text(edited.replace("0.95", "0.5"))
    given = read_script(path, EMITTED)
    assert (given.seed, given.clip_norm) == (7, None)
    assert given.adamw == AdamWDefaults(betas=(0.9, 0.5))
    assert len(given.edits) == 1


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        (EMITTED.replace("def main", "def run"), "the script has no function main"),
        (EMITTED.replace("step():", "step(:"), "the script is no Python"),
        ("", "no function main and no train_step"),
    ],
)
def test_what_cannot_be_run_is_refused(text: str, telling: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InputError, match=telling):
        read_script(path, EMITTED)


def test_changes_are_carried_over_to_the_script_of_a_smaller_model(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    edited = EMITTED.replace("    sum_gradients()\n", "").replace(
        "    step()", "    step()\n    log()"
    )
    path.write_text(edited)
    carried = carried_over(read_script(path, EMITTED), EMITTED, SMALLER)
    assert "WIDTH = 64" in carried
    assert "sum_gradients" not in carried
    assert "    step()\n    log()\n" in carried
    path.write_text(EMITTED.replace("512", "256"))
    with pytest.raises(InputError, match="no counterpart") as refusal:
        carried_over(read_script(path, EMITTED), EMITTED, SMALLER)
    assert "line 5" in refusal.value.where


def test_a_script_that_is_written_again_at_once_is_read_again(tmp_path: Path) -> None:
    path, now = tmp_path / "train.py", time.time()
    for steps in (3, 4):
        path.write_text(f"STEPS = {steps}\n", encoding="utf-8")
        os.utime(path, (now, now))
        assert steps == imported(path).STEPS
