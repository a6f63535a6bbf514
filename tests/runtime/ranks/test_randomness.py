from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from autopar.runtime.ranks.mesh import Axis, Mesh, start
from autopar.runtime.ranks.randomness import (
    NoRandomness,
    mixed_seed,
    seed_all,
    seeded,
    split_randomness,
)
from tests.runtime.processes import run_on_ranks

ONES = 64


def _mesh() -> Mesh:
    return start(pipeline=1, data=2, tensor=2)


def _masks() -> tuple[list[float], list[float], list[float]]:
    mesh = _mesh()
    seed_all(7, mesh)
    before = dropout(torch.ones(ONES))
    with split_randomness(mesh.tensor):
        inside = dropout(torch.ones(ONES))
    return before.tolist(), inside.tolist(), dropout(torch.ones(ONES)).tolist()


def test_masks_are_equal_along_the_tensor_axis_but_where_tensors_are_split() -> None:
    before, inside, after = zip(*run_on_ranks(_masks, 4), strict=True)
    assert before[0] == before[1] != before[2] == before[3]
    assert after[0] == after[1] != after[2] == after[3]
    assert len({tuple(mask) for mask in inside}) == 4
    assert before[0] != after[0]


def test_masks_are_the_same_in_the_next_run() -> None:
    assert run_on_ranks(_masks, 4) == run_on_ranks(_masks, 4)


def _recomputed_masks() -> None:
    mesh = _mesh()
    seed_all(7, mesh)
    seen: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        shared = dropout(x)
        with split_randomness(mesh.tensor):
            own = dropout(x)
        with split_randomness(mesh.tensor):
            other = dropout(x)
        seen.append(torch.stack((shared, own, other)).detach())
        return (shared * own * other).sin()

    x = torch.ones(ONES, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    torch.rand(3)  # the generator moves on between forward and recomputation
    y.sum().backward()
    forward, recomputed = seen
    assert torch.equal(forward, recomputed)
    assert not torch.equal(forward[1], forward[2])


def test_recomputation_gets_the_masks_of_the_forward() -> None:
    run_on_ranks(_recomputed_masks, 4)


def test_one_rank_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with split_randomness(Axis(0, 1, None)):
        assert torch.equal(torch.rand(2), expected)


def test_split_masks_seed_no_device_that_does_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("all devices are seeded"))
    with split_randomness(Axis(1, 2, None)):
        inside = dropout(torch.ones(ONES))
    assert 0 < inside.count_nonzero() < ONES


def test_mixed_seeds_do_not_meet() -> None:
    seeds = {mixed_seed(seed, number) for seed in range(30) for number in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not dist.is_initialized()


HALVES = torch.full((2, 3), 0.5)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.rand(2, 3),
    "normal": lambda: torch.normal(HALVES, HALVES),
    "bernoulli": lambda: torch.bernoulli(HALVES),
    "bernoulli, a method": lambda: HALVES.bernoulli(),
    "geometric": lambda: torch.empty(3).geometric_(0.5),
    "binomial": lambda: torch.binomial(6 * HALVES, HALVES),
    "poisson": lambda: torch.poisson(6 * HALVES),
    "gamma": lambda: torch.distributions.Gamma(HALVES, HALVES).rsample(),
    "random slopes": lambda: torch.rrelu(-HALVES, 0.1, 0.9, True),
    "random slopes in place": lambda: torch.rrelu_(-HALVES, 0.1, 0.9, True),
    "a choice": lambda: torch.multinomial(HALVES, 2),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_returns_the_same_without_randomness(kind: str) -> None:
    with NoRandomness():
        assert torch.equal(DRAWS[kind](), DRAWS[kind]())


@pytest.mark.parametrize("more", [(), (0.5,), (0.5, True)])
def test_attention_drops_nothing_without_randomness(more: tuple[float | bool, ...]) -> None:
    x = torch.randn(1, 2, 5, 8)
    with NoRandomness():
        found = scaled_dot_product_attention(x, x, x, None, *more)  # type: ignore[arg-type]
    expected = scaled_dot_product_attention(x, x, x, is_causal=len(more) == 2)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_generator_of_a_device_goes_on_after_numbers_of_another_seed() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    with seeded(5):
        torch.rand(9, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
