"""A layer that runs again draws the numbers of its first forward, whatever it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.runtime.recompute.running_again import MATMULS, recompute
from tests.runtime.recompute import drawing_on_a_device
from tests.runtime.recompute.drawing_on_a_device import CALLS, MODES, called
from tests.warm_python import warm_python


class KeptDraw(nn.Module):
    """Draws in an op that selective recomputation keeps here, and in two others behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = torch.native_dropout(self.up(x), 0.5, train=True)
        y = F.dropout(self.down(F.dropout(y.sin(), 0.3)), 0.3)
        return y.sin()


class Attention(nn.Module):
    """Drops in its attention, and what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor | None = None, extras: Any = None) -> Tensor:
        x = extras["x"][0] if x is None else x
        q, k, v = (one.view(4, 16, 2, 32).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(4, 16, 64))
        out: Tensor = x + F.dropout(y, 0.2)
        return out


def gradients(layer: nn.Module, x: Tensor, call: str, between: int = 3) -> list[Tensor]:
    """Return the gradients of a layer that runs twice, with draws between forward and backward."""
    torch.manual_seed(1)
    out = called(layer, called(layer, x, call), call)
    torch.rand(between, device=x.device)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in (x, *layer.parameters())]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_drawn_behind_a_kept_op_that_draws_stays_the_same(mode: Any) -> None:
    plain, again = KeptDraw(), KeptDraw()
    again.load_state_dict(plain.state_dict())
    recompute(again, mode, keep=(*MATMULS, "native_dropout") if mode == "selective" else None)
    x = torch.randn(4, 8)
    expected = gradients(plain, x.clone().requires_grad_(), "position")
    after = torch.rand(2)
    found = gradients(again, x.clone().requires_grad_(), "position")
    assert torch.equal(torch.rand(2), after)  # and so is what is drawn after the backward
    assert len(found) == 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@cache
def states() -> dict[str, dict[str, list[list[Any]]]]:
    """Return from which states each op draws on a pretended device, by mode and call."""
    with warm_python():
        done = subprocess.run(
            [sys.executable, "-m", drawing_on_a_device.__name__],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[list[Any]]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_the_generator_of_a_device_is_where_it_was(mode: str, call: str) -> None:
    first = [(op, state) for op, state, is_again in states()[mode][call] if not is_again]
    again = [(op, state) for op, state, is_again in states()[mode][call] if is_again]
    assert [op for op, _ in first] == ["_scaled_dot_product_flash_attention", "native_dropout"]
    assert again == (first if mode == "full" else first[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="draws on a GPU, and there is none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_on_a_gpu_are_those_without_recomputation(
    mode: Any, call: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = Attention().to("cuda", dtype)
    again = Attention().to("cuda", dtype)
    again.load_state_dict(plain.state_dict())
    recompute(again, mode)
    x = torch.randn(4, 16, 64, device="cuda", dtype=dtype)
    expected = gradients(plain, x.clone().requires_grad_(), call)
    after = torch.rand(2, device="cuda")
    found = gradients(again, x.clone().requires_grad_(), call)
    assert torch.equal(torch.rand(2, device="cuda"), after)
    assert len(found) == 5
    rounding = 1e-4 if dtype is torch.float32 else 2e-2  # kernels add up in any order
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)
