"""Replicas that take local steps train as one process that plays all of them, one by one."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from autopar.runtime.data.loss import largest_norm
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm
from autopar.runtime.optimizer.outer import OuterOptimizer, average, parts_of_model
from autopar.runtime.ranks.mesh import Axis, start
from autopar.runtime.ranks.transport import HostLink
from tests.cells import cells
from tests.runtime.processes import RankError, run_on_ranks
from tests.runtime.small_training import (
    CLIP_NORM,
    largest_difference,
    weight_decay_on_matrices,
    whole,
)
from tests.runtime.test_combined_axes import MICROBATCHES, build, inputs, learn, own_part

STEPS, REPLICAS = 6, 2
DILOCO: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}
AVERAGE: dict[str, Any] = {"lr": 1.0, "momentum": 0.0}


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
        if (step + 1) % every and step + 1 < STEPS:
            continue
        with torch.no_grad():
            if (step + 1) % every:  # a short round ends with the mean
                outer = AVERAGE
            for place, (was, momentum) in enumerate(zip(common, momenta, strict=True)):
                held = [list(one.parameters())[place] for one in replicas]
                change = sum((was - one for one in held), torch.zeros_like(was)) / REPLICAS
                momentum.mul_(outer["momentum"]).add_(change)
                was -= outer["lr"] * (change + outer["momentum"] * momentum)
                for one in held:
                    one.copy_(was)
    return whole(replicas[0].named_parameters())


def train(
    zero: int, shard: int, tensor: int, every: int, outer: dict[str, Any], kind: Any
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
        if (step + 1) % every == 0 or step + 1 == STEPS:
            averaging.step(step + 1)
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


def test_a_last_round_that_is_shorter_ends_with_the_mean() -> None:
    assert STEPS % 4
    check(alone(4, DILOCO), 1, 2, 1, 4, DILOCO, weight_decay_on_matrices)


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


def _streamed(
    parts: int, delay: int, *, zero: int = 1, last: int = STEPS, **where: bool
) -> dict[str, Tensor]:
    """Train with outer steps of parts in turn; plain ones if there are none."""
    mesh = start(data=4, shard=2, sync_every=3 if parts < 2 else 4)
    model = build(mesh.tensor)
    wrap(model, mesh, zero=zero, bucket_bytes=500, units=list(model))
    optimizer = build_optimizer([model], weight_decay_on_matrices, zero=zero, mesh=mesh)
    rates: dict[str, Any] = {**DILOCO, **where}
    outer = OuterOptimizer([model], optimizer, mesh, parts=max(1, parts), delay=delay, **rates)
    for step in range(1, last + 1):
        optimizer.zero_grad()
        learn(model, step - 1, mesh)
        optimizer.step()
        if parts:
            outer.step_parts(step)
        elif step % mesh.sync_every == 0:
            outer.step(step)
    own = whole(model.named_parameters())
    outer.average_replicas()
    return {**own, **{f"met {name}": one for name, one in whole(model.named_parameters()).items()}}


def test_one_part_without_delay_is_the_plain_outer_step_to_the_bit() -> None:
    for zero in (0, 1, 3):
        plain = run_on_ranks(partial(_streamed, zero=zero), 4, 0, 0)
        streamed = run_on_ranks(partial(_streamed, zero=zero), 4, 1, 0)
        for one, other in zip(plain, streamed, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_replicas_that_train_on_during_outer_steps_meet_at_their_mean() -> None:
    ranks = run_on_ranks(partial(_streamed, zero=0), 4, 2, 1)
    names = [name for name in ranks[0] if not name.startswith("met ")]
    apart = max(float((ranks[0][name] - ranks[2][name]).abs().max()) for name in names)
    assert apart > 1e-6
    for name in names:
        mean = (ranks[0][name] + ranks[2][name]) / 2
        for rank in ranks:
            assert torch.allclose(rank[f"met {name}"], mean, rtol=0, atol=1e-12)


def _on_host(parts: int, delay: int, *, zero: int) -> tuple[bool, int, int]:
    """Return whether an outer optimizer on the host trains equally in 4 steps.

    Then the elements that were allocated there, and those of the rank's part of the model.
    """
    here = _streamed(parts, delay, zero=zero, last=4)
    allocated, plain = list[Tensor](), HostLink.empty

    def empty(link: HostLink, elements: int, dtype: torch.dtype) -> Tensor:
        allocated.append(plain(link, elements, dtype))
        return allocated[-1]

    with patch.object(HostLink, "empty", empty):
        there = _streamed(parts, delay, zero=zero, last=4, on_host=True)
    is_equal = all(torch.equal(one, there[name]) for name, one in here.items())
    own = sum(one.numel() for one in build(Axis(0, 1, None)).parameters()) // (2 if zero else 1)
    return is_equal, sum(one.numel() for one in allocated), own


def test_an_outer_optimizer_on_the_host_trains_equally_to_the_bit() -> None:
    for parts, delay, zero in ((0, 0, 0), (0, 0, 3), (2, 1, 1)):
        for is_equal, allocated, own in run_on_ranks(partial(_on_host, zero=zero), 4, parts, delay):
            assert is_equal
            # the common parameters, and the mean change; of a part on its way, what was sent
            assert allocated == own * (3 if delay else 2)


def test_parts_need_a_local_step_more_than_their_delay() -> None:
    with pytest.raises(RankError, match="4 local steps do not suffice for 2 parts"):
        run_on_ranks(_streamed, 4, 2, 2)


def test_parts_of_a_model_are_even_and_known_by_names_alone() -> None:
    sizes = {f"h.{layer}.{name}": size for layer in range(6) for name, size in KINDS.items()}
    parts = parts_of_model(sizes, 3)
    assert parts == parts_of_model(dict(reversed(sizes.items())), 3)
    filled = [sum(size for name, size in sizes.items() if parts[name] == one) for one in range(3)]
    assert filled == [4 * sum(KINDS.values()) // 2] * 3
    assert {parts[f"h.{layer}.up"] for layer in range(3)} == {0, 1, 2}  # dealt out in turn


KINDS = {"up": 400, "down": 400, "norm": 10}


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
        averaging.step(step + 1)
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
    averaging.step(2)
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
