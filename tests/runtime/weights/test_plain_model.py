"""The plain model: what PyTorch makes, with weights that are those of the recipe."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.weights.initial_weights import build
from autopar.runtime.weights.plain_model import plain_model
from tests.models_zoo.model_files import load


class _Draws(nn.Module):
    """Draws in the ways that a constructor may, and keeps the numbers."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.register_buffer("drawn", draw(), persistent=False)
        self.after = nn.Linear(3, 3)


def _truncated(mean: float) -> Tensor:
    return nn.init.trunc_normal_(torch.empty(50), mean, 1.0, 0.0, 1.0)


def _until_it_fits() -> Tensor:
    drawn = torch.randn(4)
    while drawn.abs().max() > 1:
        drawn.normal_()
    return drawn


def _twice_from_one_state() -> Tensor:
    state = torch.get_rng_state()
    first = torch.randn(3)
    torch.set_rng_state(state)
    return torch.cat((first, torch.randn(3)))


UNSEEDED: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(3),
    "randperm": lambda: torch.randperm(7),
    "randint": lambda: torch.randint(0, 100, (5,)),
    "truncated": lambda: _truncated(0.5),
    "truncated far out": lambda: _truncated(-1.0),
    "until it fits": _until_it_fits,
    "twice from one state": _twice_from_one_state,
    "chosen": lambda: torch.multinomial(torch.ones(9), 4),
    "like another": lambda: torch.rand_like(torch.ones(3)),
    "nothing": lambda: torch.empty(0).normal_(),
}


def _of(draw: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    return lambda: _Draws(draw)


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    mine = dict([*one.named_parameters(), *one.named_buffers()])
    theirs = dict([*other.named_parameters(), *other.named_buffers()])
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.filterwarnings("error:the model is built in full")
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "resnet"])
def test_a_model_of_the_zoo_is_the_plain_one(name: str) -> None:
    factory = load(name).build_model
    _assert_equal(build(factory, seed=3), plain_model(factory, seed=3))


def _seeded() -> Tensor:
    torch.manual_seed(5)
    return torch.cat((torch.randn(3), torch.randn(3)))


def _two_nets_of_one_seed() -> Tensor:
    nets = []
    for _ in range(2):
        torch.manual_seed(5)
        nets.append(nn.Linear(3, 3).weight.detach())
    return torch.stack(nets)


def _forked() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.randn(20)


def test_a_forked_generator_leaves_the_draws_behind_it_alone() -> None:
    forked = plain_model(_of(_forked), seed=3)
    without = plain_model(_of(lambda: torch.zeros(20)), seed=3)
    assert torch.equal(forked.get_parameter("after.weight"), without.get_parameter("after.weight"))


def test_draws_of_tensors_without_memory_are_none() -> None:
    skipped = plain_model(_of(lambda: torch.empty(3, device="meta").normal_()), seed=3)
    without = plain_model(_of(lambda: torch.zeros(3)), seed=3)
    assert torch.equal(skipped.get_parameter("after.weight"), without.get_parameter("after.weight"))
