"""Replicas that take local steps train as one process that plays all of them, one by one."""

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from autopar.runtime.data.loss import largest_norm
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm
from autopar.runtime.optimizer.outer import OuterOptimizer, average
from autopar.runtime.ranks.mesh import Axis, start
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import (
    CLIP_NORM,
    largest_difference,
    weight_decay_on_matrices,
    whole,
)
from tests.runtime.test_combined_axes import MICROBATCHES, build, inputs, learn, own_part

STEPS, REPLICAS = 6, 2
DILOCO = {"lr": 0.7, "momentum": 0.9}
AVERAGE = {"lr": 1.0, "momentum": 0.0}


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05)


def learnt(model: nn.Module, step: int, rows: slice) -> None:
    """Add the gradients of some rows of a step, with the weights of the whole global batch."""
    for x in inputs(step, 0, 1):
        own = x[rows]
        (model(own).square().mean() / MICROBATCHES).backward()


def alone(every: int, outer: dict[str, float]) -> dict[str, Tensor]:
    """One process plays the replicas; the outer optimizer is written out."""
    replicas = [build(Axis(0, 1, None)) for _ in range(REPLICAS)]
    optimizers = [weight_decay_on_matrices(one.parameters()) for one in replicas]
    common = [one.detach().clone() for one in replicas[0].parameters()]
    momenta = [torch.zeros_like(one) for one in common]
    rows = 4 // REPLICAS
    for step in range(STEPS):
        for number, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            learnt(model, step, slice(number * rows, (number + 1) * rows))
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for place, (was, momentum) in enumerate(zip(common, momenta, strict=True)):
                held = [list(one.parameters())[place] for one in replicas]
                change = sum((was - one for one in held), torch.zeros_like(was)) / REPLICAS
                momentum.mul_(outer["momentum"]).add_(change)
                was -= outer["lr"] * (change + outer["momentum"] * momentum)
                for one in held:
                    one.copy_(was)
    return whole(replicas[0].named_parameters())


def train(
    zero: int, shard: int, tensor: int, every: int, outer: dict[str, float], kind: Any
) -> tuple[int, dict[str, Tensor]]:
    mesh = start(data=REPLICAS * shard, tensor=tensor, shard=shard, sync_every=every)
    model = build(mesh.tensor)
    split = frozenset(n for n, _ in model.named_parameters() if n.endswith(("up", "down")))
    wrap(model, mesh, zero=zero, bucket_bytes=500, units=list(model))
    optimizer = build_optimizer([model], kind, zero=zero, mesh=mesh)
    averaging = OuterOptimizer([model], optimizer, mesh, **outer)
    for step in range(STEPS):
        optimizer.zero_grad()
        learn(model, step, mesh)
        clip_by_global_norm([model], CLIP_NORM, mesh, split=split)
        optimizer.step()
        if (step + 1) % every == 0:
            averaging.step()
    return mesh.tensor.rank, whole(model.named_parameters())


def check(expected: dict[str, Tensor], zero: int, shard: int, tensor: int, *rest: object) -> None:
    for rank, parameters in run_on_ranks(train, 4, zero, shard, tensor, *rest):
        cut = {name: own_part(name, value, rank) for name, value in expected.items()}
        assert largest_difference(parameters, cut if tensor > 1 else expected) < 1e-9


STAND = ((0, "diloco"), (1, "average"), (2, "diloco"), (3, "diloco"))


@pytest.mark.parametrize(("zero", "outer"), cells(product(range(4), ("diloco", "average")), STAND))
def test_replicas_of_two_ranks_train_as_one_process_that_plays_them(zero: int, outer: str) -> None:
    rates = DILOCO if outer == "diloco" else AVERAGE
    expected = alone(3, rates)
    check(expected, zero, 2, 1, 3, rates, weight_decay_on_matrices)


def test_replicas_of_one_rank_with_a_tensor_axis_train_as_one_process() -> None:
    check(alone(2, DILOCO), 0, 1, 2, 2, DILOCO, weight_decay_on_matrices)


def test_one_local_step_of_sgd_and_plain_averaging_are_synchronous_training() -> None:
    model = build(Axis(0, 1, None))
    optimizer = plain_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        learnt(model, step, slice(None))
        optimizer.step()
    found = run_on_ranks(train_unclipped, 4)
    for parameters in found:
        assert largest_difference(parameters, whole(model.named_parameters())) < 1e-9


def train_unclipped() -> dict[str, Tensor]:
    mesh = start(data=4, shard=2, sync_every=1)
    model = build(mesh.tensor)
    wrap(model, mesh, zero=1, bucket_bytes=500)
    optimizer = build_optimizer([model], plain_sgd, zero=1, mesh=mesh)
    averaging = OuterOptimizer([model], optimizer, mesh, **AVERAGE)
    for step in range(STEPS):
        optimizer.zero_grad()
        learn(model, step, mesh)
        optimizer.step()
        averaging.step()
    return whole(model.named_parameters())


def statistics_after_an_outer_step() -> tuple[Tensor, Tensor]:
    mesh = start(data=2, shard=1, sync_every=2)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm).double()
    wrap(model, mesh, sync_batch_norm=True)
    optimizer = build_optimizer([model], plain_sgd, mesh=mesh)
    averaging = OuterOptimizer([model], optimizer, mesh, **AVERAGE)
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3) * (1 + mesh.data.rank)
    model(rows).sum().backward()
    own = rows.mean(0) * 0.1  # the momentum of running means
    averaging.step()
    found = norm.running_mean
    assert found is not None
    return own, found.clone()


def test_running_statistics_become_their_mean() -> None:
    (one, found), (other, same) = run_on_ranks(statistics_after_an_outer_step, 2)
    assert torch.allclose(found, (one + other) / 2, rtol=0, atol=1e-12)
    assert torch.equal(found, same)
    assert not torch.allclose(one, other)


def largest_of_norms(own: list[float]) -> float:
    mesh = start(data=4, shard=2, sync_every=2)
    return largest_norm(torch.tensor(own[mesh.replica.rank]), mesh)


def test_every_rank_knows_the_largest_norm_and_whether_one_is_nan() -> None:
    assert run_on_ranks(largest_of_norms, 4, [1.0, 3.0]) == [3.0] * 4
    assert all(map(math.isnan, run_on_ranks(largest_of_norms, 4, [math.nan, 3.0])))


def means_of_many() -> list[Tensor]:
    mesh = start(data=2, shard=1, sync_every=1)
    sizes = (3, 4_000_000, 3_000_000, 0, 5)  # the third begins a bucket of its own
    tensors = [torch.full((size,), float(mesh.data.rank + size)) for size in sizes]
    average(tensors, mesh.replica)
    return [one[:1] for one in tensors]


def test_tensors_of_several_buckets_become_their_means() -> None:
    for found in run_on_ranks(means_of_many, 2):
        assert [one.tolist() for one in found] == [[3.5], [4_000_000.5], [3_000_000.5], [], [5.5]]
