"""What is compared to the last digits is neither drawn nor rounded to float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autopar.codegen.proof.exactness import ExactMode, KeepFloat64


def test_casts_of_float64_to_float32_are_left_out() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with ExactMode():
        found = (x.float(), x.to(torch.float32), functional.softmax(x, 0, dtype=torch.float32))
    assert {one.dtype for one in found} == {torch.float64}
    assert torch.equal(found[0], x)


def test_a_mask_of_places_that_is_drawn_masks_some_of_them_and_every_row_alike() -> None:
    with ExactMode():
        masks = torch.stack([torch.rand(4, 20) < chance for chance in (0.15, 0.5, 0.85)])
    assert (masks.sum(2) / 20 - torch.tensor([[0.15], [0.5], [0.85]])).abs().max() < 0.06
    assert torch.equal(masks, masks[:, :1].expand(3, 4, 20))


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(),
        nn.Dropout(inplace=True),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_dropped(module: nn.Module) -> None:
    sides = {"Dropout1d": 3, "Dropout2d": 4}.get(type(module).__name__, 5)
    x = torch.rand([4] * sides)
    with ExactMode():
        assert torch.equal(module(x.clone()), x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_nothing_is_dropped_between_recurrent_layers(kind: Callable[..., nn.Module]) -> None:
    module, x = kind(4, 4, num_layers=3, dropout=0.5), torch.rand(3, 2, 4)
    with ExactMode():
        found = module(x)[0]
    assert torch.equal(found, module.eval()(x)[0])


def test_functions_that_draw_within_do_without() -> None:
    x = torch.tensor([[0.1, 0.9, -0.5]], requires_grad=True)
    with ExactMode():
        assert torch.equal(nn.RReLU()(x), nn.RReLU().eval()(x))
        soft = functional.gumbel_softmax(x, tau=0.7)
        hard = functional.gumbel_softmax(x, tau=0.7, hard=True)
    assert torch.allclose(soft, (x / 0.7).softmax(-1))
    assert hard.argmax() == 1
    weights = torch.rand(3)
    found = [
        torch.autograd.grad((one * weights).sum(), x, retain_graph=True) for one in (soft, hard)
    ]
    assert torch.allclose(found[0][0], found[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["method", "function", "grad"])
def test_layers_that_compute_again_do_so_as_the_first_time(dtype: torch.dtype, way: str) -> None:
    def layer(x: Tensor) -> Tensor:
        made = torch.zeros(3) + torch.rand(3) + functional.dropout(x, 0.5).float()
        return made.square()

    x = torch.arange(3, dtype=dtype).requires_grad_()
    with ExactMode(dtype):
        loss = torch.as_tensor(checkpoint(layer, x, use_reentrant=False)).sum()
        if way == "grad":
            (gradient,) = torch.autograd.grad(loss, x)
        else:
            (loss.backward if way == "method" else partial(torch.autograd.backward, loss))()
            gradient = torch.as_tensor(x.grad)
        assert torch.zeros(1).dtype is dtype
    assert torch.equal(gradient, 2 * (x + 0.5))


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_", "log_normal_", "cauchy_"])
def test_nothing_is_drawn_in_place(name: str) -> None:
    with ExactMode():
        noise = getattr(torch.empty(4), name)()
    assert torch.equal(noise, noise[:1].expand(4))


def test_in_float64_numbers_of_a_model_are_those_of_its_training() -> None:
    with ExactMode(torch.float64):
        found = torch.tensor([0.3, 0.5])
    assert found.dtype is torch.float64
    assert torch.equal(found, torch.tensor([0.3, 0.5]).double())


def test_in_float64_weights_of_classes_are_as_wide_as_the_scores() -> None:
    scores, target = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 2])
    with ExactMode(torch.float64):
        found = functional.cross_entropy(scores, target, torch.ones(3))
        named = functional.cross_entropy(scores, target=target, weight=torch.ones(3))
    assert found == named == functional.cross_entropy(scores, target)


def test_in_float64_what_is_made_from_nothing_is_float64_too() -> None:
    with ExactMode(torch.float64):
        assert torch.zeros(2, dtype=torch.float32).dtype is torch.float64
        assert torch.full((), torch.finfo(torch.float64).min).dtype is torch.float64
    assert torch.zeros(2).dtype is torch.float32


@pytest.mark.parametrize("kind", [ExactMode, KeepFloat64])
def test_the_step_of_an_optimizer_is_as_it_is_without(kind: type[KeepFloat64]) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], fused=True)
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.append(torch.zeros(1).dtype))
    with kind(torch.float64):
        weight.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.zeros(1, dtype=torch.float32).dtype is torch.float64
        assert torch.zeros(1).dtype is torch.float64
    # On a GPU the fused kernel reads the count of steps as float32, whatever it is.
    assert optimizer.state[weight]["step"].dtype is torch.float32
    assert found == [torch.float32]
    assert torch.get_default_dtype() is torch.float32


def test_the_scale_of_a_loss_is_undone_in_every_type() -> None:
    gradients = [torch.tensor([6.0, 2.0], dtype=torch.float64)]
    with ExactMode(torch.float64):
        overflow, inverse = torch.zeros(1), torch.full((1,), 0.5)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        assert not overflow
        gradients[0][0] = torch.inf
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
    assert overflow
    assert gradients[0][1] == 0.5
