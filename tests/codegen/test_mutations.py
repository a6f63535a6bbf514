"""Verification finds what an edit takes out of a training, and nothing else.

`python -m benchmarks.mutations` tries all edits.
"""

from __future__ import annotations

import pytest

from tests.codegen.mutations import HARMLESS, MUTATIONS, verdict

FOUND = {
    "gradients of tied weights not summed": "differs",
    "stages draw alike": "draws the same numbers",
    "no dropout after the embedding": "one process draws",
    "gradients are not clipped": "never clipped",
    "averaged with the first microbatch": "differs",
}
HARMLESS_HERE = ("no log", "a check of the loss")


@pytest.mark.parametrize("name", FOUND)
def test_an_edit_that_changes_the_training_is_found(name: str) -> None:
    ((kind, edit),) = [(k, e) for k, own in MUTATIONS.items() for e in own if e.name == name]
    assert FOUND[name] in verdict(kind, edit)


@pytest.mark.parametrize("name", HARMLESS_HERE)
def test_an_edit_that_does_not_stays_equal(name: str) -> None:
    ((kind, edit),) = [(k, e) for k, own in HARMLESS.items() for e in own if e.name == name]
    assert verdict(kind, edit) == "equal"


def test_there_are_thirty_edits_of_five_plans() -> None:
    assert len(MUTATIONS) == len(HARMLESS) == 5
    assert sum(map(len, MUTATIONS.values())) >= 30
    assert sum(map(len, HARMLESS.values())) >= 10
