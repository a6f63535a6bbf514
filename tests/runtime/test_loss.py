import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from autopar.runtime.loss import loss_scales, scale_loss, weighed
from autopar.runtime.mesh import start
from tests.runtime.ranks import run_on_ranks


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(4, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(32).view(4, 8) % 5
    target[0, 1:] = -100  # microbatches with 1, 8, 0 and 5 valid targets
    target[2] = -100
    target[3, :3] = -100
    return logits, target


def _data_parallel_gradient(microbatches: int) -> torch.Tensor:
    """The gradient as two data ranks get it that average theirs, as DDP does."""
    mesh = start(pipeline=1, data=2, tensor=1)
    logits, target = (part.chunk(2)[mesh.data.rank].chunk(microbatches) for part in _batch())
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    counts = torch.stack([(part != -100).sum() for part in target])
    for x, y, scale in zip(logits, target, loss_scales(counts, mesh), strict=True):
        loss = cross_entropy((x * weight).flatten(0, 1), y.flatten())
        scale_loss(loss, scale).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / 2


def test_scaled_microbatches_give_the_gradient_of_the_mean_over_all_valid_targets() -> None:
    logits, target = _batch()
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    cross_entropy((logits * weight).flatten(0, 1), target.flatten()).backward()  # type: ignore[no-untyped-call]
    for microbatches in (1, 2):
        for found in run_on_ranks(_data_parallel_gradient, 2, microbatches):
            torch.testing.assert_close(found, weight.grad, rtol=0, atol=1e-14)


def _two_means(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Two means over targets that count differently, of one batch."""
    logits = (x * weight).flatten(0, 1)
    others = y.roll(3, 1).masked_fill(y == 1, -100)
    return [cross_entropy(logits, y.flatten()), cross_entropy(logits, others.flatten())]


def _gradient_of_two_means(microbatches: int) -> torch.Tensor:
    mesh = start(pipeline=1, data=2, tensor=1)
    logits, target = (part.chunk(2)[mesh.data.rank].chunk(microbatches) for part in _batch())
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    counts = [
        torch.stack([(y != -100).sum(), ((y.roll(3, 1) != -100) & (y != 1)).sum()]) for y in target
    ]
    batches = [{"x": x, "y": y} for x, y in zip(logits, target, strict=True)]
    for batch in weighed(batches, torch.stack(counts), mesh):
        means = _two_means(weight, batch["x"], batch["y"])
        terms = [scale_loss(*pair) for pair in zip(means, batch["loss_weights"], strict=True)]
        (torch.stack(terms).sum() / microbatches).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / 2


def test_weighed_terms_give_the_gradient_of_the_sum_of_the_means() -> None:
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    torch.stack(_two_means(weight, *_batch())).sum().backward()  # type: ignore[no-untyped-call]
    for microbatches in (1, 2):
        for found in run_on_ranks(_gradient_of_two_means, 2, microbatches):
            torch.testing.assert_close(found, weight.grad, rtol=0, atol=1e-14)


def test_scales_are_one_where_all_counts_are_equal() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        for counts, expected in (([4, 4], [0.5, 0.5]), ([0, 0], [0.0, 0.0])):
            scales = loss_scales(torch.tensor(counts), mesh)
            assert [float(scale.value()) for scale in scales] == expected
    finally:
        dist.destroy_process_group()
