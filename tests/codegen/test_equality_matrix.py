"""Under every kind of plan, every model trains as it would in one process, to the last digits.

`benchmarks/equality_matrix.py` computes all cells; here is every kind once, each with the
next of the models that it goes with.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from autopar.codegen.emit import emit
from autopar.planner.errors import AutoparError
from autopar.runtime.ranks.mesh import start
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.matrix import TOLERANCE, compare_cell, plan_of, split_axes, worst_of
from tests.codegen.matrix_cells import KINDS, REFUSED, SUBJECTS, axes_of, is_applicable
from tests.codegen.padding import Padding, padded
from tests.codegen.plans import pinned_plan
from tests.planner.subjects import zoo_file
from tests.runtime.data.reading import read_rows

MODELS_PER_KIND = 1
IN_SINGLE = ("ddp 2", "zero-3 2", "tp+sp 2", "pp zero-bubble-v 2", "dp×tp 4", "zero-1×pp 4")


def chosen() -> list[tuple[str, str]]:
    """Return the cells that are computed here, those on few ranks first: each size has a pool."""
    models = list(SUBJECTS)
    found = []
    for number, kind in enumerate(KINDS):
        turned = [models[(number + i) % len(models)] for i in range(len(models))]
        fitting = (m for m in turned if is_applicable(m, kind) and (m, kind) not in REFUSED)
        found += [(model, kind) for model in islice(fitting, MODELS_PER_KIND)]
    return sorted(found, key=lambda cell: KINDS[cell[1]].ranks)


# Others stand for these: with fewer ranks, with the same axes and another level of sharding, or
# another schedule of the same stages.
STAND = {
    "ddp 4",
    "zero-2 2", "zero-3 4", "hsdp zero-3 4", "chosen tp 2", "vocabulary 2", "pp gpipe 2",
    "pp 1f1b 4", "pp interleaved-1f1b 2", "pp zb 2", "zero-3×tp+sp 4",
    "zero-1×tp×pp 8", "full zero-3 2", "selective pp 2", "full pp zero-bubble-v 2",
    "host zero-3 2",
    "saved there tp+sp 2", "saved there pp interleaved-1f1b 2", "inputs there tp+sp 2",
}  # fmt: skip
IN_SINGLE_TOO = ("pp zero-bubble-v 2",)


@pytest.mark.parametrize(
    ("model", "kind"), cells(chosen(), [cell for cell in chosen() if cell[1] in STAND])
)
def test_a_script_trains_as_one_process_does(model: str, kind: str) -> None:
    wanted = axes_of(SUBJECTS[model], KINDS[kind], last=True)
    assert not wanted or split_axes(model, plan_of(model, kind)).intersection(wanted)
    worst = worst_of(compare_cell(model, kind), "float64")
    assert worst.largest <= TOLERANCE["float64"], worst


def test_images_that_lie_by_pixels_are_learnt_alike() -> None:
    plan = pinned_plan("resnet.py", data=2, global_batch=4, device="h100-sxm")
    assert "channels_last=IMAGES" in emit(plan, destination=Path("train.py"))
    assert compare(plan, steps=2).is_within(1e-9)


@pytest.mark.parametrize("kind", cells(IN_SINGLE, IN_SINGLE_TOO))
def test_losses_in_single_precision_follow(kind: str) -> None:
    worst = worst_of(compare_cell("gpt2", kind, dtype="float32"), "float32")
    assert worst.largest <= TOLERANCE["float32"], worst


@pytest.mark.parametrize(("model", "kind"), REFUSED)
def test_what_does_not_go_together_is_refused_with_its_reason(model: str, kind: str) -> None:
    with pytest.raises(AutoparError) as refusal:
        plan_of(model, kind)
    assert REFUSED[model, kind] in str(refusal.value)


def test_every_kind_and_every_model_is_there() -> None:
    assert {kind for _, kind in chosen()} == set(KINDS)
    stand = [cell for cell in chosen() if cell[1] in STAND]
    assert {model for model, _ in stand} == set(SUBJECTS)
    assert KINDS.keys() > STAND


def test_microbatches_have_unequal_numbers_of_targets() -> None:
    file = zoo_file("gpt2.py")
    make = file.build_dataset
    assert make is not None
    with padded(Padding.ANY):
        mesh = start(pipeline=1, data=1, tensor=1)
        batches = read_rows(make, file.example_batch, mesh, microbatch=4, seed=0)
        counts = {int((batch["labels"] >= 0).sum()) for batch in islice(batches, 4)}
    assert len(counts) == 4
