"""The user's optimizer works on this rank's pieces and stays the user's own."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer, made_optimizer
from autopar.runtime.ranks.mesh import start
from autopar.runtime.weights.initial_weights import build as build_from_recipe
from autopar.runtime.weights.initial_weights import record
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import whole


def clamping(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return one with hooks of the user's own, before and after a step."""
    optimizer = SGD(parameters, lr=0.1)

    def clamp(given: Optimizer, gradients: bool) -> None:
        for group in given.param_groups:
            for one in group["params"]:
                (one.grad if gradients else one.detach()).clamp_(-0.1, 0.1)

    optimizer.register_step_pre_hook(lambda given, *_: clamp(given, True))
    optimizer.register_step_post_hook(lambda given, *_: clamp(given, False))
    return optimizer


OPTIMIZERS = {
    "sgd with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "hooks of the user's": clamping,
    "named parameters": lambda named_parameters: SGD(
        [one for _, one in sorted(named_parameters)], lr=0.1, momentum=0.9
    ),
    "the model": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
}

SGD_OF_TENTHS = partial(SGD, lr=0.1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 3, dtype=torch.float64, generator=generator)


def step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train(name: str, zero: int) -> tuple[list[torch.Tensor], list[float]]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build()
    wrap(model, mesh, zero=zero, units=list(model))
    optimizer = build_optimizer([model], OPTIMIZERS[name], zero=zero, mesh=mesh)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for _ in range(5):
        step(model, optimizer, data().chunk(2)[mesh.rank])
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return list(whole(model.named_parameters()).values()), rates


STAND = [(name, at % 4) for number, name in enumerate(OPTIMIZERS) for at in (number, number + 2)]


@pytest.mark.parametrize(("name", "zero"), cells(product(OPTIMIZERS, range(4)), STAND))
def test_any_elementwise_optimizer_and_its_scheduler_work_sharded(name: str, zero: int) -> None:
    model = build()
    optimizer = made_optimizer(OPTIMIZERS[name], [model], list(model.parameters()))
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(5):
        step(model, optimizer, data())
        scheduler.step()
    for parameters, rates in run_on_ranks(train, 2, name, zero):
        assert rates[-1] == scheduler.get_last_lr()[0]
        for found, expected in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)


def train_from_meta(zero: int) -> list[torch.Tensor]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model, recipe = record(build, seed=0)
    wrap(model, mesh, zero=zero)
    recipe.materialise(model, {}, mesh.tensor, mesh.device)
    optimizer = build_optimizer([model], SGD_OF_TENTHS, zero=zero, mesh=mesh)
    for _ in range(3):
        step(model, optimizer, data().chunk(2)[mesh.rank])
    return list(whole(model.named_parameters()).values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_unequal_shards_that_were_made_on_meta_are_trained(zero: int) -> None:
    model = build_from_recipe(build, seed=0)
    optimizer = SGD_OF_TENTHS(model.parameters())
    for _ in range(3):
        step(model, optimizer, data())
    for parameters in run_on_ranks(train_from_meta, 2, zero):
        for found, expected in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)


def muon(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


def refuse(zero: int) -> str:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build()
    wrap(model, mesh, zero=zero)
    try:
        build_optimizer([model], muon, zero=zero, mesh=mesh)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("zero", [1, 2])
def test_an_optimizer_of_whole_matrices_is_refused_parts_of_them(zero: int) -> None:
    assert run_on_ranks(refuse, 2, zero)[0].startswith(
        f"Muon needs whole parameters, and ZeRO-{zero}"
    )


def test_one_process_without_sharding_gets_the_users_optimizer_as_it_is() -> None:
    (kind,) = set(run_on_ranks(plain, 1))
    assert kind == ("AdamW", True, True)


def plain() -> tuple[str, bool, bool]:
    mesh = start(pipeline=1, data=1, tensor=1)
    model = build()
    optimizer = build_optimizer([model], AdamW, zero=3, mesh=mesh)
    group = optimizer.param_groups[0]
    same = all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    return type(optimizer).__name__, bool(group["fused"]), same


def test_a_choice_of_kernel_by_the_user_stands() -> None:
    assert run_on_ranks(chosen_kernel, 1) == [None]


def chosen_kernel() -> bool | None:
    mesh = start(pipeline=1, data=1, tensor=1)
    model = build()
    optimizer = build_optimizer([model], lambda p: AdamW(p, foreach=True), zero=0, mesh=mesh)
    fused: bool | None = optimizer.param_groups[0]["fused"]
    return fused


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_do_not_add_up_over_steps(set_to_none: bool) -> None:
    for gradient in run_on_ranks(gradient_after_zero, 2, set_to_none):
        assert not gradient


def gradient_after_zero(set_to_none: bool) -> float:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build()
    wrap(model, mesh, zero=1)
    optimizer = build_optimizer([model], AdamW, zero=1, mesh=mesh)
    step(model, optimizer, data())
    optimizer.zero_grad(set_to_none=set_to_none)
    return sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("make", [AdamW, SGD_OF_TENTHS])
def test_a_gradient_in_another_memory_order_reaches_its_own_weights(
    make: Callable[..., Optimizer],
) -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 4, 2, 2), torch.randn(6, 4, 2, 2)
    mesh = start(pipeline=1, data=1, tensor=1)
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        parameter = nn.Parameter(weight.clone())
        optimizer = build_optimizer([nn.ParameterList([parameter])], make, zero=0, mesh=mesh)
        parameter.grad = gradient.clone(memory_format=order)
        optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
