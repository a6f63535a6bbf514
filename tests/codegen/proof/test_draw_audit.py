"""What the ranks of a script draw is compared with what one process draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.codegen.proof.draws import AxisSizes, NotedDraw, draw_faults

KEPT = (0.9,)
ONE = AxisSizes(pipeline=1, data=1, tensor=2)


def drawn(state: str, numbers: int = 8, module: str = "h.0.drop", **other: object) -> NotedDraw:
    own = NotedDraw(module, "gpt2.py:60", "bernoulli_", KEPT, numbers, state, False, True)
    return replace(own, **other)  # type: ignore[arg-type]


ALONE = [drawn("alone")]


def test_ranks_that_share_a_mask_or_split_one_draw_as_one_process() -> None:
    assert draw_faults([[drawn("a")], [drawn("a")]], ALONE, ONE) == ()
    assert draw_faults([[drawn("a", 4)], [drawn("b", 4)]], ALONE, ONE) == ()


def test_data_ranks_that_draw_alike_are_told_with_their_axis() -> None:
    axes = AxisSizes(pipeline=1, data=2, tensor=1)
    (fault,) = draw_faults([[drawn("a", 4)], [drawn("a", 4)]], ALONE, axes)
    assert "h.0.drop (dropout, p 0.1): draws 4 independent numbers, 8 in one process" in fault
    assert "ranks 0, 1 of the data axis share a mask at gpt2.py:60" in fault


def test_whole_masks_that_differ_are_told() -> None:
    (fault,) = draw_faults([[drawn("a")], [drawn("b")]], ALONE, ONE)
    assert "16 independent numbers, 8 in one process: ranks draw different masks" in fault


def test_a_lost_dropout_is_told_by_its_module_and_probability() -> None:
    (fault,) = draw_faults([[], []], ALONE, ONE)
    assert fault == (
        "h.0.drop (dropout, p 0.1): one process draws 8 numbers at gpt2.py:60, the script none"
    )
    (more,) = draw_faults([[drawn("a")], [drawn("a")]], [], ONE)
    assert more.endswith("the script draws 8 numbers at gpt2.py:60, one process none")


def test_another_probability_is_told() -> None:
    other = drawn("a", settings=(0.8,))
    (fault,) = draw_faults([[other], [other]], ALONE, ONE)
    assert "h.0.drop (dropout, p 0.1): the script has dropout, p 0.2 there" in fault


def test_layers_with_one_fault_are_told_together() -> None:
    alone = [drawn(str(layer), module=f"h.{layer}.drop") for layer in range(12)]
    (fault,) = draw_faults([[], []], alone, ONE)
    assert fault.startswith("h.*.drop (dropout, p 0.1) × 12: one process draws 8 numbers")


def test_a_layer_that_runs_again_draws_what_it_drew() -> None:
    again = drawn("a", is_again=True)
    assert draw_faults([[drawn("a"), again]] * 2, ALONE, ONE) == ()
    (fault,) = draw_faults([[drawn("a"), replace(again, state="b")]] * 2, ALONE, ONE)
    assert "draws another mask when it runs again" in fault


def test_stages_that_draw_the_same_numbers_are_told() -> None:
    axes = AxisSizes(pipeline=2, data=1, tensor=1)
    alone = [drawn("x"), drawn("y", module="h.1.drop")]
    (fault,) = draw_faults([[drawn("a")], [drawn("a", module="h.1.drop")]], alone, axes)
    assert "draws the same numbers as h.1.drop" in fault
    assert "ranks 0, 1 of the pipeline axis" in fault


def test_what_nothing_has_seeded_is_told() -> None:
    loose = drawn("a", is_seeded=False)
    (fault,) = draw_faults([[loose], [loose]], ALONE, ONE)
    assert "seed_all is missing" in fault


def test_code_that_stands_in_its_callers_draws_for_the_modules_inside() -> None:
    alone = [drawn("x", module="h.0.attn"), drawn("y", module="h.0.attn.drop")]
    moved = [drawn("a", module="h.0.attn"), drawn("b", module="h.0.attn")]
    assert draw_faults([moved, moved], alone, ONE) == ()
    assert draw_faults([moved[:1]] * 2, alone, ONE) != ()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_no_row_has_of_its_own_may_be_drawn_by_each_part(microbatches: int) -> None:
    axes = AxisSizes(pipeline=1, data=2, tensor=1, microbatches=microbatches)
    ranks = [[drawn(f"{rank}{m}") for m in range(microbatches)] for rank in range(2)]
    assert draw_faults(ranks, ALONE, axes) == ()
