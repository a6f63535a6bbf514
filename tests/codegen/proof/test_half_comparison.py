"""A script in 16 bits has to begin as plain PyTorch does, and to stay as near to fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.codegen.proof.comparison import (
    ALL,
    FEW,
    LOSSES,
    RankBlock,
    RankInHalf,
    compared_in_half,
    times_as_far,
    with_losses,
)
from autopar.codegen.proof.plain_half import PlainHalf
from autopar.runtime.tensor.shards import whole

MANY = 4 * FEW


def training(misses: Mapping[str, float], *, loss: float = 0.0) -> PlainHalf:
    """Return a training that moves each number by 1, and misses that by so much."""
    numbers = {"many": MANY, "few": 2, "table": MANY}
    initial = {name: torch.zeros(count).double() for name, count in numbers.items()}
    moved = {"many": 1.0, "few": 1.0, "table": 0.0}
    final = {name: initial[name] + moved[name] + misses.get(name, 0.0) for name in numbers}
    return PlainHalf(
        initial=initial,
        types={"table": "float32"},
        losses=(3.0 + loss, 2.0 + loss),
        final=final,
        dtype="bfloat16",
        frozen=frozenset(),
    )


HALF, SINGLE = training({"many": 0.01, "few": 0.01}, loss=0.1), training({})


def times(misses: Mapping[str, float], *, loss: float = 0.0) -> dict[str, float]:
    found = training(misses, loss=loss)
    return times_as_far(with_losses(found.final, found.losses), HALF, SINGLE)


def test_a_training_that_misses_as_much_is_as_near() -> None:
    found = times({"many": -0.01, "few": 0.01}, loss=-0.1)
    assert found == pytest.approx({"many": 0.5, "table": 0.0, ALL: 1.0, LOSSES: 1.0}, rel=0.01)


def test_what_moves_otherwise_is_as_many_times_as_far() -> None:
    assert times({"many": 0.1})["many"] == pytest.approx(5.0, rel=0.01)
    assert times({"table": 1e-6})["table"] == math.inf  # which nothing moves
    assert times({}, loss=0.3)[LOSSES] == pytest.approx(3.0)


def test_few_numbers_count_among_all() -> None:
    found = times({"few": 0.5})
    assert "few" not in found
    assert found[ALL] > 2.0


def rank(of: PlainHalf, *, types: Mapping[str, str] | None = None) -> RankInHalf:
    def held(tensors: Mapping[str, Tensor]) -> list[RankBlock]:
        return [RankBlock(n, whole(tuple(t.shape)), t.double()) for n, t in tensors.items()]

    return RankInHalf(
        initial=held(of.initial),
        types=of.types if types is None else types,
        losses=of.losses,
        final=held(of.final),
    )


def test_equal_trainings_are_equal() -> None:
    found = compared_in_half([rank(HALF)], HALF, SINGLE)
    assert found.is_as_near
    assert not found.faults


def test_other_numbers_at_the_start_are_named() -> None:
    rounded = replace(HALF, initial={**HALF.initial, "many": HALF.initial["many"] + 1e-9})
    found = compared_in_half([rank(HALF), rank(rounded)], HALF, SINGLE)
    assert found.faults == ("many: begins with other numbers than build_model() gives it",)
    assert not found.is_as_near


def test_another_type_of_a_buffer_is_named() -> None:
    found = compared_in_half([rank(HALF, types={"table": "bfloat16"})], HALF, SINGLE)
    assert found.faults == ("table: is bfloat16 in the script, and float32 in plain PyTorch",)


def test_weights_that_are_frozen_may_be_there_in_more_than_16_bits() -> None:
    exact = torch.full((MANY,), 0.1).double()
    half = exact.bfloat16().double()
    frozen = frozenset({"many"})
    expected = replace(HALF, initial={**HALF.initial, "many": half}, frozen=frozen)
    for value in (exact, half):
        one = replace(HALF, initial={**HALF.initial, "many": value})
        assert not compared_in_half([rank(one)], expected, SINGLE).faults
    other = replace(HALF, initial={**HALF.initial, "many": half + 0.1})
    assert compared_in_half([rank(other)], expected, SINGLE).faults


def test_a_step_that_is_missing_is_infinitely_far() -> None:
    short = replace(HALF, losses=HALF.losses[:1])
    assert compared_in_half([rank(short)], HALF, SINGLE).loss == math.inf
