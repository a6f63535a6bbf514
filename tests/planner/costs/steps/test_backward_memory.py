"""What a backward holds, beside a list of all that is allocated and freed, and beside autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import profile

from autopar.planner.costs.prediction import Arrangement, LayerCost, Zero
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import rank_moments
from autopar.planner.costs.steps.memory import most_in_one_pass, most_of_microbatches
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.precision import Precision
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, layer

SHARED = "shared"
SHARDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A layer: what it saves, what it works with, and its weight in fp32."""

    saved: int
    transient: int
    learning: int
    weight: str
    gradient: int


def random_layers(random: Random, *, is_tied: bool) -> list[Made]:
    """Return an embedding, blocks and a head; some blocks are equal."""

    def one(weight: str) -> Made:
        transient = random.randint(0, 60)
        return Made(
            saved=random.randint(0, 100),
            transient=transient,
            learning=random.randint(0, transient),
            weight=weight,
            gradient=8 * random.randint(1, 20),
        )

    block, shared = one(""), 8 * random.randint(1, 40)
    blocks = [replace(block, weight=f"{number}") for number in range(random.randint(1, 4))]
    blocks.insert(random.randint(0, len(blocks)), one("other"))
    ends = [replace(one(SHARED), gradient=shared), one("head")]
    if is_tied:
        ends[1] = replace(ends[1], weight=SHARED, gradient=shared)
    return [ends[0], *blocks, ends[1]]


def costs_of(layers: Sequence[Made], precision: Precision, *, is_tied: bool) -> list[LayerCost]:
    """Return the layers as the planner has them, one object for equal ones."""
    copies = 1 if precision.is_half else 2  # of what waits, while the first layer adds to it
    known: dict[object, LayerCost] = {}
    costs = []
    for place, one in enumerate(layers):
        is_last = place == len(layers) - 1
        own = 0 if is_tied and is_last else one.gradient
        cost = layer(
            saved_bytes=one.saved,
            transient_bytes=one.transient,
            learning_bytes=one.learning,
            learned_gradient_bytes=one.gradient,
            gradient_bytes=own,
            parameter_bytes=own // 2,
            waiting_gradient_bytes=layers[0].gradient
            * (is_tied and not is_last)
            * (1 if place else copies),
        )
        costs.append(known.setdefault(cost, cost))
    return costs


def events(layers: Sequence[Made], arrangement: Arrangement) -> Iterator[int]:
    """Yield the bytes that one forward and one backward allocate and free, one after the other."""
    yield from (one.saved for one in layers)
    narrow = 2 if arrangement.precision.is_half else 0
    uses = {one.weight: [other.weight for other in layers].count(one.weight) for one in layers}
    waiting: set[str] = set()
    for one in reversed(layers):
        yield from (one.transient, -one.transient, one.learning)
        if narrow:
            yield one.gradient // narrow
        yield one.gradient
        if narrow:
            yield -one.gradient // narrow
        uses[one.weight] -= 1
        if one.weight in waiting:  # fp32: out of place
            yield from (-one.gradient,) if narrow else (one.gradient, -2 * one.gradient)
        if uses[one.weight]:
            waiting.add(one.weight)
        yield from (-one.learning, -one.saved)


def sharded_events(layers: Sequence[Made], zero: Zero) -> Iterator[int]:
    """Yield the same where each rank keeps a part of the gradients, and gathers what it runs."""
    frees = zero is Zero.PARAMETERS
    yield from (one.saved + (0 if frees else one.gradient // 2) for one in layers)
    if frees:
        yield layers[-1].gradient // 2
    for place in reversed(range(len(layers))):
        one = layers[place]
        if frees and place:
            yield layers[place - 1].gradient // 2
        yield from (one.transient, -one.transient, one.learning, one.gradient)
        yield -(-one.gradient // SHARDS)
        yield from (-one.gradient, -one.learning, -one.saved, -one.gradient // 2)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_only_backward_of_a_step_holds_what_a_list_of_all_it_does_comes_to(
    is_tied: bool, precision: Precision
) -> None:
    for seed in range(200):
        layers = random_layers(Random(seed), is_tied=is_tied)
        arrangement = replace(ARRANGEMENT, precision=precision)
        found = most_in_one_pass(
            stage_load(costs_of(layers, precision, is_tied=is_tied)), arrangement
        )
        held = max(accumulate(events(layers, arrangement)))
        # The copy in fp32 counts for all of the first layer, not for its weight's moment alone.
        more = layers[0].gradient if is_tied and not precision.is_half else 0
        assert held <= sum(found) <= held + more


@pytest.mark.parametrize("zero", [Zero.GRADIENTS, Zero.PARAMETERS])
def test_sharded_gradients_are_whole_for_one_layer_at_a_time(zero: Zero) -> None:
    arrangement = replace(ARRANGEMENT, data=SHARDS, shard=SHARDS, zero=zero)
    for seed in range(200):
        layers = random_layers(Random(seed), is_tied=False)
        found = most_in_one_pass(
            stage_load(costs_of(layers, Precision.BF16, is_tied=False)), arrangement
        )
        assert sum(found) == max(accumulate(sharded_events(layers, zero)))


def test_gradients_with_buckets_lie_beside_these_until_one_is_complete() -> None:
    # The head's 800 have a bucket to themselves; then 3 · 40 lie beside one of 100.
    arrangement = replace(ARRANGEMENT, data=2, zero=Zero.OPTIMIZER, bucket_bytes=100)
    block = layer(saved_bytes=10, gradient_bytes=40, learned_gradient_bytes=40)
    head = replace(block, gradient_bytes=800, learned_gradient_bytes=800)
    assert most_in_one_pass(stage_load([block] * 3), arrangement).gradients == 100
    found = most_in_one_pass(stage_load([block, block, head]), arrangement)
    assert found == (30, 800, 40, 400)


def test_gradients_of_further_microbatches_are_added_one_by_one_to_those_that_are_there() -> None:
    # A weight of 4 · 1000: 4000 in fp32 and 2000 in 16 bits, when the layers behind have freed 200.
    (moments,) = rank_moments(
        ARRANGEMENT.schedule, PipelineShape(ranks=1, stages_per_rank=1, microbatches=2)
    )
    table = layer(learned_gradient_bytes=4_000)
    found = most_of_microbatches(
        [stage_load([table, LAYER, LAYER])], moments, replace(ARRANGEMENT, microbatches=2)
    )
    assert found == (100, 0, 40, 6_000)


WORDS, WIDTH, ROWS = 20_000, 32, 2


class Words(nn.Module):
    """An embedding and a head, which may share their weights."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return a loss."""
        return cross_entropy(self.head(self.table(words)).float(), words)


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_take_what_autograd_takes(
    is_tied: bool, is_half: bool, microbatches: int
) -> None:
    model = Words(is_tied=is_tied)
    for parameter in model.parameters() if is_half else ():
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32
    words = torch.randint(WORDS, (ROWS,))
    for _ in range(microbatches - 1):
        model(words).backward()
    with profile(profile_memory=True) as profiled:
        model(words).backward()
    events = profiled.profiler.kineto_results.events()
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()) if one.nbytes()]
    size = 4 * WORDS * WIDTH
    table = layer(
        saved_bytes=0, transient_bytes=0, learning_bytes=0, gradient_bytes=size,
        learned_gradient_bytes=size, waiting_gradient_bytes=size * is_tied * (1 if is_half else 2),
    )  # fmt: skip
    head = replace(table, gradient_bytes=size * (not is_tied), waiting_gradient_bytes=0)
    arrangement = replace(
        ARRANGEMENT,
        microbatches=microbatches,
        precision=Precision.BF16 if is_half else Precision.FP32,
    )
    shape = PipelineShape(ranks=1, stages_per_rank=1, microbatches=microbatches)
    (moments,) = rank_moments(ARRANGEMENT.schedule, shape)
    load = stage_load([table, head])
    if microbatches == 1:
        found = most_in_one_pass(load, arrangement)
    else:
        found = most_of_microbatches([load], moments, arrangement)
    assert max(accumulate(sizes)) / size == pytest.approx(sum(found) / size, abs=0.2)
