"""Verification finds what an edit takes out of a training, and nothing else.

`python -m benchmarks.mutations` tries all edits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from tests.cells import cells
from tests.codegen.mutations import HARMLESS, MUTATIONS, plan_of, verdict

FOUND = {
    "gradients of tied weights not summed": "differs",
    "stages draw alike": "draws the same numbers",
    "no dropout after the embedding": "one process draws",
    "gradients are not clipped": "never clipped",
    "averaged with the first microbatch": "differs",
    "masters begin with rounded weights": "in bf16, words.weight: begins with other numbers",
    "buffers are rounded": "in bf16, inv_freq: begins with other numbers",
    "other masks behind a kept attention": "draws another mask when it runs again",
}
STAND = (  # one by each way to find it
    "gradients of tied weights not summed",
    "stages draw alike",
    "gradients are not clipped",
    "masters begin with rounded weights",
    "other masks behind a kept attention",
)
HARMLESS_HERE = ("another line of log", "a check of the loss")


@pytest.mark.parametrize("name", cells(FOUND, STAND))
def test_an_edit_that_changes_the_training_is_found(name: str) -> None:
    ((kind, edit),) = [(k, e) for k, own in MUTATIONS.items() for e in own if e.name == name]
    assert FOUND[name] in verdict(kind, edit)


@pytest.mark.parametrize("name", cells(HARMLESS_HERE, HARMLESS_HERE[:1]))
def test_an_edit_that_does_not_stays_equal(name: str) -> None:
    ((kind, edit),) = [(k, e) for k, own in HARMLESS.items() for e in own if e.name == name]
    assert verdict(kind, edit) == "equal"


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_edit_is_of_a_text_that_stands_in_its_script(kind: str, tmp_path: Path) -> None:
    text = write_script(plan_of(kind), tmp_path).read_text(encoding="utf-8")
    missing = [e.name for e in (*MUTATIONS[kind], *HARMLESS[kind]) if e.old not in text]
    assert not missing


def test_there_are_forty_edits_of_seven_plans() -> None:
    assert len(MUTATIONS) == len(HARMLESS) == 7
    assert sum(map(len, MUTATIONS.values())) >= 40
    assert sum(map(len, HARMLESS.values())) >= 10
