"""A module in 16 bits has in 16 bits what it computes with, and nothing that it keeps in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks

HALF = torch.bfloat16


class Layer(nn.Module):
    """Turns angles into what it multiplies with; counts its runs, and averages its input."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        self.steps += 1
        self.mean.mul_(0.999)
        out: Tensor = self.linear(x) * angles.cos().to(x.dtype)
        return out


class Model(nn.Module):
    inv_freq: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("inv_freq", 0.1 ** torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("table", torch.linspace(-1, 1, 8))
        self.layers.register_buffer("again", self.table)
        self.seen: list[torch.dtype] = []
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda _, given: self.seen.append(given[1].dtype))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * self.inv_freq
        x = x + self.table
        for layer in self.layers:
            x = layer(x, angles)
        loss: Tensor = self.frozen(x).float().square().mean()
        return loss


def trained(zero: int) -> tuple[dict[str, Tensor], set[torch.dtype], bool]:
    """Train 300 steps; return the buffers, what layers were given angles in, what is one tensor."""
    mesh = start(pipeline=1, data=2, tensor=1)
    model = Model()
    names = ("table", "layers.again")
    units = list(model.layers)
    wrap(model, mesh, zero=zero, units=units, compute_dtype=HALF, half_buffers=names)
    optimizer = build_optimizer([model], lambda p: torch.optim.SGD(p, lr=0.1), zero=zero, mesh=mesh)
    for _ in range(300):
        model(torch.ones(2, 8), torch.tensor([1024, 4096])).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_one = model.table is model.layers.again
    return dict(model.named_buffers()), set(model.seen), is_one


@pytest.mark.parametrize("zero", [1, 3])
def test_buffers_keep_their_types_and_count_on(zero: int) -> None:
    built = Model()
    for buffers, seen, is_one in run_on_ranks(trained, 2, zero):
        assert torch.equal(buffers["inv_freq"], built.inv_freq)
        assert torch.equal(buffers["table"], built.table.to(HALF))
        assert is_one
        assert float(buffers["layers.1.steps"]) == 300.0  # bf16 knows no 257
        torch.testing.assert_close(buffers["layers.1.mean"], torch.full((8,), 0.999**300))
        assert seen == {torch.float32}  # units of fully_shard, too


def test_a_stage_receives_tensors_in_the_types_of_the_stage_before() -> None:
    assert run_on_ranks(types_given, 2) == [[torch.float32, HALF]] * 2


def types_given() -> list[torch.dtype]:
    mesh = start(pipeline=2, data=1, tensor=1)
    found: list[torch.dtype] = []

    class Stage(nn.Module):
        def forward(self, angles: Tensor, *, x: Tensor) -> None:
            found.extend((angles.dtype, x.dtype))

    wrap(Stage(), mesh, zero=0, compute_dtype=HALF)(torch.ones(2), x=torch.ones(2))
    return found


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_with_running_statistics_compute_with_weights_in_fp32(kind: type[nn.Module]) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    norm = kind(4, affine=True, track_running_stats=True)
    plain = kind(4, affine=True, track_running_stats=True)
    x = torch.randn(3, 4, 5).to(HALF)
    made = wrap(norm, mesh, zero=0, compute_dtype=HALF)(x)
    assert made.dtype is HALF
    torch.testing.assert_close(made, plain(x.float()).to(HALF))
    for name, value in plain.named_buffers():
        torch.testing.assert_close(dict(norm.named_buffers())[name], value)
