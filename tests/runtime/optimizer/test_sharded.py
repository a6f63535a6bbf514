"""Under ZeRO-1 every rank has its own part of the gradients, and steps that alone."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from autopar.runtime.data_parallel.wrapping import buckets_of, wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import LossScale, local_gradients, sum_replicated
from autopar.runtime.pipeline.stage import Tie, TiedWeights
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def held_after_a_backward(shard: int) -> dict[str, list[tuple[int, list[float]]]]:
    """Return where in each flattened gradient what this rank holds begins, and its values."""
    mesh = start(pipeline=1, data=4, tensor=1, shard=shard)
    model = build()
    wrap(model, mesh, zero=1, bucket_bytes=100)
    model(data(mesh.rank)).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    found: dict[str, list[tuple[int, list[float]]]] = {}
    for one in local_gradients([model]):
        assert one.span is not None
        found.setdefault(one.name, []).append((one.span.start, one.value.tolist()))
    return found


@pytest.mark.parametrize("shard", [2, 4])
def test_the_parts_of_all_ranks_are_the_mean_gradient(shard: int) -> None:
    model = build()
    torch.stack([model(data(rank)).square().mean() for rank in range(4)]).mean().backward()  # type: ignore[no-untyped-call]
    ranks = run_on_ranks(held_after_a_backward, 4, shard)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for copy in range(0, 4, shard):
            parts = [part for one in ranks[copy : copy + shard] for part in one.get(name, ())]
            together = torch.tensor([value for _, part in sorted(parts) for value in part]).double()
            expected = parameter.grad.flatten()
            torch.testing.assert_close(together, expected, rtol=0, atol=1e-7)


def test_a_rank_whose_part_is_empty_trains_along() -> None:
    """Two elements, four ranks."""
    found = run_on_ranks(train_two_elements, 4)
    assert [pieces for pieces, _ in found] == [1, 1, 0, 0]
    assert {tuple(weights) for _, weights in found} == {tuple(found[0][1])}
    assert found[0][1] != [1.0, 1.0]


def train_two_elements() -> tuple[int, list[float]]:
    mesh = start(pipeline=1, data=4, tensor=1)
    model = nn.Linear(1, 2, bias=False).double()
    nn.init.ones_(model.weight)
    wrap(model, mesh, zero=1)
    optimizer = build_optimizer([model], AdamW, zero=1, mesh=mesh)
    for _ in range(3):
        model(torch.ones(1, 1).double()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.param_groups[0]["params"]), model.weight.flatten().tolist()


def test_an_overflow_in_one_rank_s_part_is_one_on_all() -> None:
    assert run_on_ranks(overflow, 4) == [False] * 4


def overflow() -> bool:
    mesh = start(pipeline=1, data=4, tensor=1)
    model = nn.Linear(1, 8, bias=False)
    wrap(model, mesh, zero=1, compute_dtype=torch.float16)
    scale = LossScale(mesh, initial=2.0)
    outputs = model(torch.ones(1, 1)).float().flatten()
    weights = torch.ones(8)
    weights[0] = float("inf") if mesh.rank == 3 else 1.0  # an element of rank 0's part
    (outputs * weights).sum().backward()
    return scale.unscale([model])


class Uneven(nn.Module):
    """A weight of which tensor ranks hold parts of different sizes, beside whole ones."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.split = nn.Parameter(torch.ones(rows))
        self.second = nn.Parameter(torch.ones(5))

    def forward(self, factor: float) -> Tensor:
        return factor * (self.first.sum() + self.split.sum() + self.second.sum())


def test_partial_gradients_are_summed_between_equal_parts() -> None:
    for first, split, second in run_on_ranks(step_uneven, 4):
        # Gradients 1, 2 on the first tensor rank's data ranks, 3, 4 on the other's: 1.5 + 3.5.
        assert first == second == [1.0 - 5.0]
        assert split in ([1.0 - 1.5], [1.0 - 3.5])


def step_uneven() -> list[list[float]]:
    mesh = start(pipeline=1, data=2, tensor=2)
    model = Uneven(2 + 4 * mesh.tensor.rank)
    names = ("first", "second")
    wrap(model, mesh, zero=1, apart=(names,))
    optimizer = build_optimizer([model], lambda p: SGD(p, lr=1.0), zero=1, mesh=mesh)
    model(1.0 + mesh.data.rank + 2 * mesh.tensor.rank).backward()
    sum_replicated([model], names, mesh.tensor)
    optimizer.step()
    return [sorted(set(parameter.tolist())) for parameter in model.parameters()]


def test_gradients_travel_once_to_their_part_and_parameters_back() -> None:
    """Two volumes of traffic, not three: no rank receives a whole sum of gradients."""
    assert run_on_ranks(parts_received, 2) == [[(16, 8)], [(16, 8)]]


def parts_received() -> list[tuple[int, int]]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = nn.Linear(4, 4, bias=False)
    wrap(model, mesh, zero=1)
    model(torch.full((1, 4), 1.0 + mesh.rank)).sum().backward()
    buckets = buckets_of(model)
    assert buckets is not None
    own = [gradient.value for gradient in local_gradients([model])]
    assert all(part.eq(1.5).all() for part in own)
    dist.barrier()
    return [
        (buffer.numel(), part.numel()) for buffer, part in zip(buckets.buffers, own, strict=True)
    ]


def test_a_tied_parameter_that_shares_its_bucket_is_refused() -> None:
    (message,) = set(run_on_ranks(sum_tied_beside_others, 4))
    assert "name it in wrap(…, apart=" in message


def sum_tied_beside_others() -> str:
    mesh = start(pipeline=2, data=2, tensor=1)
    model = build()
    wrap(model, mesh, zero=1)
    model(data(0)).sum().backward()
    ties = TiedWeights(mesh, [model], [Tie(("0.weight",), (0, 1))])
    try:
        ties.sum_gradients()
    except RuntimeError as error:
        return str(error)
    return ""
