"""Tensor, data and ZeRO axes together train as one process does."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.wrapping import set_last, wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm
from autopar.runtime.ranks.mesh import Axis, Mesh, start
from autopar.runtime.recompute.running_again import Mode, recompute
from autopar.runtime.tensor.collectives import sum_gradients, sum_partials
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import (
    CLIP_NORM,
    STEPS,
    largest_difference,
    weight_decay_on_matrices,
    whole,
)

INNER, WIDTH, LAYERS, MICROBATCHES = 8, 6, 3, 2


class Layer(nn.Module):
    """An MLP cut over the tensor axis, between a norm and a bias that every rank holds."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        own = slice(axis.rank * INNER // axis.size, (axis.rank + 1) * INNER // axis.size)
        up, down = torch.randn(INNER, WIDTH).double(), torch.randn(WIDTH, INNER).double()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Parameter(up[own].clone())
        self.down = nn.Parameter(down[:, own].clone())
        self.bias = nn.Parameter(torch.randn(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(sum_gradients(self.norm(x), self.axis) @ self.up.T)
        return x + sum_partials(inner @ self.down.T, self.axis) + self.bias


def build(axis: Axis) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(axis) for _ in range(LAYERS)))


def inputs(step: int, rank: int, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    batches = [torch.randn(4, WIDTH, generator=generator).double() for _ in range(MICROBATCHES)]
    return [batch.chunk(ranks)[rank] for batch in batches]


def learn(model: nn.Sequential, step: int, mesh: Mesh) -> None:
    """Run the forwards and backwards of this rank's rows of a step."""
    for index, x in enumerate(inputs(step, mesh.data.rank, mesh.data.size)):
        set_last(model, index == MICROBATCHES - 1)
        (model(x).square().mean() / MICROBATCHES).backward()


def alone() -> dict[str, Tensor]:
    model = build(Axis(0, 1, None))
    optimizer = weight_decay_on_matrices(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for x in inputs(step, 0, 1):
            (model(x).square().mean() / MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    return whole(model.named_parameters())


def train(zero: int, shard: int | None, data: int, mode: Mode) -> tuple[int, dict[str, Tensor]]:
    mesh = start(pipeline=1, data=data, tensor=2, shard=shard)
    model = build(mesh.tensor)
    for layer in model:
        recompute(layer, mode)
    split = frozenset(n for n, _ in model.named_parameters() if n.endswith(("up", "down")))
    wrap(model, mesh, zero=zero, bucket_bytes=500, units=list(model))
    optimizer = build_optimizer([model], weight_decay_on_matrices, zero=zero, mesh=mesh)
    for step in range(STEPS):
        optimizer.zero_grad()
        learn(model, step, mesh)
        clip_by_global_norm([model], CLIP_NORM, mesh, split=split)
        optimizer.step()
    return mesh.tensor.rank, whole(model.named_parameters())


def own_part(name: str, value: Tensor, rank: int) -> Tensor:
    if name.endswith("up"):
        return value.chunk(2, 0)[rank]
    return value.chunk(2, 1)[rank] if name.endswith("down") else value


def check(ranks: int, *arguments: object) -> None:
    expected = alone()
    for rank, parameters in run_on_ranks(train, ranks, *arguments):
        parts = {name: own_part(name, value, rank) for name, value in expected.items()}
        assert largest_difference(parameters, parts) < 1e-12


STAND = ((0, "none"), (1, "selective"), (2, "full"), (3, "none"), (3, "full"))


@pytest.mark.parametrize(
    ("zero", "mode"), cells(product(range(4), ("none", "selective", "full")), STAND)
)
def test_tensor_and_data_axes_train_as_one_process(zero: int, mode: Mode) -> None:
    check(4, zero, None, 2, mode)


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_shards_of_tensor_parallel_layers_train_as_one_process(zero: int) -> None:
    check(8, zero, 2, 4, "none")
