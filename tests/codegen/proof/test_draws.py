"""Every op that draws is seen, with its module, its numbers, and its state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autopar.codegen.proof.draws import DrawRecorder, NotedDraw
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.randomness import split_randomness

UNSEEDED = 77


class Holder(nn.Module):
    """A module whose forward is a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def draws_of(model: nn.Module, x: Tensor) -> tuple[NotedDraw, ...]:
    torch.manual_seed(0)
    with DrawRecorder(UNSEEDED) as drawing:
        model(x)
    found: tuple[NotedDraw, ...] = drawing.draws([model])
    return found


def attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.25)


@pytest.mark.parametrize(
    ("function", "op", "settings", "numbers"),
    [
        (functional.dropout, "bernoulli_", (0.5,), 24),
        (attention, "bernoulli_", (0.75,), 2 * 3 * 3),
        (torch.rand_like, "rand_like", (), 24),
        (lambda x: x + torch.randn(3, 1), "randn", (), 3),
        (lambda x: torch.bernoulli(x.sigmoid()), "bernoulli", (), 24),
        (lambda x: x.flatten(0, 1).softmax(-1).multinomial(2, True), "multinomial", (), 12),
        (lambda x: x[torch.randperm(2)], "randperm", (), 2),
        (lambda x: functional.gumbel_softmax(x), "exponential_", (1.0,), 24),
    ],
)
def test_a_draw_is_told_with_its_numbers(
    function: Callable[[Tensor], Tensor], op: str, settings: tuple[float, ...], numbers: int
) -> None:
    (draw,) = draws_of(Holder(function), torch.zeros(2, 3, 4))
    assert (draw.op, draw.numbers) == (op, numbers)
    assert draw.settings == settings
    assert draw.is_seeded


def test_modules_that_drop_inside_are_told_by_their_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout(0.3).eval())
    (draw,) = draws_of(model, torch.zeros(2, 4))
    assert (draw.module, draw.settings) == ("1", (0.9,))
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.2)
    assert [one.module for one in draws_of(Holder(lambda x: lstm(x)[0]), torch.zeros(2, 3, 4))]


def test_a_layer_that_runs_again_draws_from_the_state_that_it_drew_from() -> None:
    drop = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    for kept in (True, False):
        x = torch.ones(2, 4, requires_grad=True)
        with DrawRecorder(UNSEEDED) as drawing:
            y = checkpoint(drop, x, use_reentrant=False, preserve_rng_state=kept)
            y.square().sum().backward()
        first, again = drawing.draws([drop])
        assert (first.is_again, again.is_again) == (False, True)
        assert (first.state == again.state) == kept


def test_a_process_that_nothing_has_seeded_is_noticed() -> None:
    torch.manual_seed(UNSEEDED)
    with DrawRecorder(UNSEEDED) as drawing:
        functional.dropout(torch.ones(3))
    assert not drawing.draws([])[0].is_seeded


def test_ranks_of_split_tensors_draw_from_other_states_and_their_seeds_are_no_draws() -> None:
    states = []
    for rank in range(2):
        torch.manual_seed(0)
        with DrawRecorder(UNSEEDED) as drawing, split_randomness(Axis(rank, 2, None)):
            functional.dropout(torch.ones(3))
        seeding, draw = drawing.draws([])
        assert seeding.seeds_a_split
        assert not draw.seeds_a_split
        states.append((seeding.state, draw.state))
    (first, own), (second, other) = states
    assert first == second
    assert own != other
