"""fp16 losses are scaled such that all ranks agree on what overflowed."""

import pytest
import torch
from torch import nn

from autopar.runtime.data.loss import scale_loss
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import LossScale
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks


def overflow_on(rank: int) -> tuple[bool, float, float]:
    mesh = start(pipeline=2, data=1, tensor=1)  # nothing but the scale is shared
    scale = LossScale(mesh, initial=8.0)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([16.0, float("inf") if mesh.rank == rank else 1.0])
    fits = scale.unscale([nn.ParameterList([weight])])
    return fits, scale.value, weight.grad[0].item()


def test_an_overflow_on_one_rank_is_an_overflow_on_all() -> None:
    assert run_on_ranks(overflow_on, 2, 1) == [(False, 4.0, 2.0)] * 2


def test_finite_gradients_are_divided_by_the_scale() -> None:
    assert run_on_ranks(overflow_on, 2, -1) == [(True, 8.0, 2.0)] * 2


def test_the_scale_doubles_after_a_calm_time_and_an_overflow_starts_it_anew() -> None:
    assert run_on_ranks(history, 1) == [[4.0, 8.0, 4.0, 4.0, 8.0]]


def history() -> list[float]:
    scale = LossScale(start(pipeline=1, data=1, tensor=1), initial=4.0, steps_until_growth=2)
    weight = nn.Parameter(torch.ones(1))
    values = []
    for gradient in (1.0, 1.0, float("nan"), 1.0, 1.0):
        weight.grad = torch.tensor([gradient])
        scale.unscale([nn.ParameterList([weight])])
        values.append(scale.value)
    return values


def test_what_overflows_at_every_scale_ends_the_training_with_its_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    scale = LossScale(start(pipeline=1, data=1, tensor=1), initial=2.0)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("inf")])
    for _ in range(11):
        scale.unscale([nn.ParameterList([weight])])
    with pytest.raises(SystemExit):
        scale.unscale([nn.ParameterList([weight])])
    assert "--dtype float32" in capfd.readouterr().err


def test_a_loss_in_16_bits_is_scaled_beyond_them() -> None:
    loss = scale_loss(torch.tensor(5.0, dtype=torch.float16), torch.tensor(0.5))
    assert loss * 2**16 == 163840.0


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_tiny_gradients_survive_fp16_only_when_scaled(zero: int, offload: bool) -> None:
    # The activation's gradient is 1e-9 without the scale: fp16 ends at 6e-8.
    for lost, found in run_on_ranks(tiny_gradient, 2, zero, offload):
        assert lost == 0.0
        assert found == pytest.approx(1e-9, rel=1e-3)


def tiny_gradient(zero: int, offload: bool) -> tuple[float, float]:
    return _train_once(zero, 1.0, offload), _train_once(zero, 2.0**20, offload)


def _train_once(zero: int, initial: float, offload: bool) -> float:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = nn.Linear(1, 2, bias=False)  # a row for each rank
    nn.init.zeros_(model.weight)
    wrap(model, mesh, zero=zero, compute_dtype=torch.float16, offload=offload)
    scale = LossScale(mesh, initial=initial)
    optimizer = build_optimizer([model], lambda p: torch.optim.SGD(p, lr=1.0), zero=zero, mesh=mesh)
    loss = model(torch.ones(1, 1)).float().sum() * 1e-9
    (loss * scale.value).backward()
    assert scale.unscale([model])
    optimizer.step()
    own: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return -own.view(-1)[0].item()
