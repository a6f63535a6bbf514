"""Models that nobody here wrote train by their scripts as they do in one process.

`benchmarks/field_trial.py` computes all cells; here are those that once were wrong, each for a
reason of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.codegen.reference import task_of, train_alone
from autopar.planner.precision import Precision
from tests.codegen.equality import trained_by_script
from tests.field.cells import KINDS, SUBJECTS
from tests.field.trial import Verdict, cell, plan_of
from tests.runtime.ranks import run_on_ranks

ONCE_WRONG = {
    ("Llama", "tp 2"): "a result that is an object",
    ("dataclass", "tp 2"): "a result that is an object, and a loss of the user's own",
    ("arguments", "tp 2"): "arguments that are no tensors",
    ("several losses", "tp 2"): "a mean over pairs of numbers",
    ("several losses", "dp 2"): "means over unequal numbers of targets, added up",
    ("DeepSeek-V3", "tp 2"): "keys that are written part by part",
    ("Llama 4", "tp 2"): "a repetition that is split",
    ("LiLT", "pp 2"): "a last layer of which less is needed, and a child that only its code calls",
    ("BERT (several labels)", "pp 2"): "a loss that torch and ATen begin differently",
    ("summed loss", "dp 2"): "a loss that is a sum over rows",
    ("summed loss", "pp 2"): "a model that is a list of its layers",
    ("masked loss", "dp 2"): "a mean that divides by what counts",
    ("Wav2Vec2 (CTC)", "dp 2"): "a loss whose inner sizes depend on values, summed over rows",
    ("drawn noise", "dp 2"): "whole numbers at random, compared as they were drawn",
    ("drawn noise", "pp 2"): "random numbers that several stages need",
    ("ResNet", "tp 2"): "a module that refuses another number of channels",
}


@pytest.mark.parametrize(("subject", "kind"), ONCE_WRONG, ids=ONCE_WRONG.values())
def test_what_once_was_wrong_is_equal(subject: str, kind: str) -> None:
    found = cell(SUBJECTS[subject], KINDS[kind])
    assert found.verdict is Verdict.EQUAL, found.detail
    assert found.divided is None or found.divided > 0.6


ONCE_FAILED_IN_16_BITS = {
    ("T5", "tp 2"): "a norm that asks for the type of its weights",
    ("Mixtral", "tp 2"): "a router in float32, whose result is cast",
    ("ResNet", "dp 2"): "batch norms, whose statistics stay in float32",
    ("drawn noise", "pp 2"): "random numbers that cross a cut",
}


@pytest.mark.parametrize(
    ("subject", "kind"), ONCE_FAILED_IN_16_BITS, ids=ONCE_FAILED_IN_16_BITS.values()
)
def test_what_once_failed_in_16_bits_follows_one_process_in_fp32(subject: str, kind: str) -> None:
    plan = plan_of(SUBJECTS[subject], replace(KINDS[kind], precision=Precision.BF16))
    task = task_of(plan, plan.model.spec, steps=3, dtype="float32")
    (expected,) = run_on_ranks(train_alone, 1, task)
    found = trained_by_script(plan, steps=3, data="dataset", dtype="bfloat16")
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
