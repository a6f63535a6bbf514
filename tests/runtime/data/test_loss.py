from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.data.batches import Batch, Weighed
from autopar.runtime.data.loss import (
    in_float32,
    scale_loss,
    summed_rows,
    weighted,
)
from autopar.runtime.ranks.mesh import Mesh, start
from tests.runtime.processes import run_on_ranks


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(4, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(32).view(4, 8) % 5
    target[0, 1:] = -100  # microbatches with 1, 8, 0 and 5 valid targets
    target[2] = -100
    target[3, :3] = -100
    return logits, target


def _by_rows(batches: Iterable[Batch], number: int, device: str = "cpu") -> Iterator[Weighed]:
    """Give each of so many microbatches of a step the weight that it has by its rows."""
    weight = torch.tensor(1 / number, dtype=torch.float64, device=device)
    return ((batch, weight) for batch in batches)


def _microbatches(mesh: Mesh, number: int) -> Iterator[Weighed]:
    logits, target = (part.chunk(2)[mesh.data.rank].chunk(number) for part in _batch())
    return _by_rows(({"x": x, "y": y} for x, y in zip(logits, target, strict=True)), number)


def _count(batch: Mapping[str, Any]) -> torch.Tensor:
    return torch.sum(batch["y"] != -100)


def _data_parallel_gradient(microbatches: int) -> torch.Tensor:
    """The gradient as two data ranks get it that average theirs, as DDP does."""
    mesh = start(pipeline=1, data=2, tensor=1)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    batches = _microbatches(mesh, microbatches)
    for batch, scale in weighted(batches, _count, mesh, microbatches=microbatches):
        loss = cross_entropy((batch["x"] * weight).flatten(0, 1), batch["y"].flatten())
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


def _masked_gradient(microbatches: int) -> torch.Tensor:
    """The gradient of a mean that the loss divides by itself, one microbatch of which is empty."""
    mesh = start(pipeline=1, data=2, tensor=1)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    batches = _microbatches(mesh, microbatches)
    for batch, scale in weighted(batches, _count, mesh, microbatches=microbatches):
        scale_loss(_masked_mean(weight, batch["x"], batch["y"]), scale).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / 2


def _masked_mean(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = y != -100
    return 0.5 * ((x * weight).square().sum(-1) * mask).sum() / mask.sum()


def test_an_empty_microbatch_of_a_mean_by_hand_sends_no_gradient() -> None:
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    _masked_mean(weight, *_batch()).backward()  # type: ignore[no-untyped-call]
    for found in run_on_ranks(_masked_gradient, 2, 2):
        torch.testing.assert_close(found, weight.grad, rtol=0, atol=1e-14)


def _two_means(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Two means over targets that count differently, of one batch."""
    logits = (x * weight).flatten(0, 1)
    others = y.roll(3, 1).masked_fill(y == 1, -100)
    return [cross_entropy(logits, y.flatten()), cross_entropy(logits, others.flatten())]


def _two_counts(batch: Mapping[str, Any]) -> torch.Tensor:
    y = batch["y"]
    return torch.stack([(y != -100).sum(), ((y.roll(3, 1) != -100) & (y != 1)).sum()])


def _gradient_of_two_means(microbatches: int) -> torch.Tensor:
    mesh = start(pipeline=1, data=2, tensor=1)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    batches = _microbatches(mesh, microbatches)
    weighed = weighted(batches, _two_counts, mesh, microbatches=microbatches)
    for batch, scale in weighed:
        means = _two_means(weight, batch["x"], batch["y"])
        terms = [scale_loss(*pair) for pair in zip(means, batch["loss_weights"], strict=True)]
        (torch.stack(terms).sum() * scale).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / 2


def test_weighed_terms_give_the_gradient_of_the_sum_of_the_means() -> None:
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    torch.stack(_two_means(weight, *_batch())).sum().backward()  # type: ignore[no-untyped-call]
    for microbatches in (1, 2):
        for found in run_on_ranks(_gradient_of_two_means, 2, microbatches):
            torch.testing.assert_close(found, weight.grad, rtol=0, atol=1e-14)


def _scales(counts: Sequence[int], microbatches: int) -> tuple[list[float], list[int]]:
    """The scales of one rank, and the microbatches that were read ahead of each."""
    mesh = start(pipeline=1, data=dist.get_world_size(), tensor=1)
    read: list[Batch] = []

    def data() -> Iterator[Batch]:
        for count in counts:
            read.append({"y": torch.arange(count + mesh.data.rank)})
            yield read[-1]

    found = []
    rows = _by_rows(data(), microbatches)
    weighed = weighted(rows, _count, mesh, microbatches=microbatches)
    for _, scale in weighed:
        found.append((float(scale), len(read)))
    return [scale for scale, _ in found], [number for _, number in found]


def test_scales_of_several_steps_are_those_of_each_alone() -> None:
    counts = (3, 1, 2, 2, 7, 0, 0, 5)
    sums = (4, 4, 4, 4, 7, 7, 5, 5)  # of the rank's own step; the other rank has one more of each
    ranks = run_on_ranks(_scales, 2, counts, 2)
    for rank, (scales, _) in enumerate(ranks):
        expected = [
            (count + rank) * 2 / (2 * own + 2) for count, own in zip(counts, sums, strict=True)
        ]
        assert scales == expected


def test_two_steps_are_read_ahead_then_four_as_evenly_as_they_are_used() -> None:
    _, read = run_on_ranks(_scales, 2, (1,) * 30, 2)[0]
    beginning = [4, 6, 8, 10, 12, 14]
    assert read == [*beginning, *range(15, 31), *[30] * 8]


class Copies(TorchDispatchMode):
    """Notes whether the host waits for copies to another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device"):
            self.wait.append(not kwargs.get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_the_device_to_weigh_what_comes_next() -> None:
    mesh = replace(start(pipeline=1, data=1, tensor=1), device=torch.device("meta"))
    data = _by_rows(({"y": torch.ones(3)} for _ in range(8)), 2, "meta")
    with Copies() as copies:
        list(weighted(data, _count, mesh, microbatches=2))
    assert copies.wait
    assert not any(copies.wait)


def test_weights_in_float32_add_up_as_exactly_as_in_float64() -> None:
    weights = torch.rand(2, 1000, generator=torch.Generator().manual_seed(1))
    sums = weights.double().sum(1)
    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        rows = _by_rows(({"weight": row} for row in weights), 2)
        weighed = weighted(rows, lambda batch: batch["weight"].sum(), mesh, microbatches=2)
        found = torch.stack([scale for _, scale in weighed])
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, sums / sums.sum(), rtol=0, atol=1e-15)


def test_the_divisor_of_a_whole_step_is_that_of_all_its_counts_together() -> None:
    counts = torch.tensor([[0.25, 3.0, 0.0], [0.5, 0.0, 2.0]])

    def divisor(counted: torch.Tensor, parts: float) -> torch.Tensor:
        first, second, third = counted.unbind(-1)
        mean = (third / parts + 1e-6) * parts
        return torch.stack((first.clamp(min=1), second + 0.5, mean), dim=-1)

    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        rows = _by_rows(({"counts": row} for row in counts), 2)
        weighed = weighted(rows, lambda x: x["counts"], mesh, microbatches=2, divisor=divisor)
        found = torch.stack([batch["loss_weights"] * scale for batch, scale in weighed])
    finally:
        dist.destroy_process_group()
    sums = torch.tensor([[7.0, 0.0, 1.0], [2.0, 5.0, 4.0]], dtype=torch.float64)  # of what counts
    losses = sums / torch.tensor([[1.0, 3.5, 1e-6], [1.0, 0.5, 2.0 + 1e-6]], dtype=torch.float64)
    whole = torch.tensor([9.0 / 1.0, 5.0 / 3.5, 2.5 / (1.0 + 1e-6)], dtype=torch.float64)
    torch.testing.assert_close((found * losses).sum(0), whole)


def test_a_mean_over_no_targets_counts_nothing() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        rows = _by_rows([{"y": torch.full((4,), -100)}] * 2, 2)
        (_, scale), _ = weighted(rows, _count, mesh, microbatches=2)
        assert float(scale_loss(torch.tensor(torch.nan), scale)) == 0
    finally:
        dist.destroy_process_group()


def test_repeated_rows_count_nothing_whatever_their_loss_is_a_mean_over() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def rows() -> Iterator[Weighed]:
        return zip([{"y": torch.arange(3)}, {"y": torch.arange(5)}], weights, strict=True)

    def counts(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.stack([_count(batch), _count(batch) // 2])

    try:
        targets = [scale for _, scale in weighted(rows(), _count, mesh, microbatches=2)]
        terms = [*weighted(rows(), counts, mesh, microbatches=2)]
        sums = [scale for _, scale in summed_rows(rows(), mesh)]
    finally:
        dist.destroy_process_group()
    assert targets == sums == [1.0, 0.0]
    assert [batch["loss_weights"].tolist() for batch, _ in terms] == [[1.0, 1.0], [0.0, 0.0]]


def test_a_loss_of_outputs_in_16_bits_is_computed_in_32() -> None:
    outputs = torch.randn(512, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = {"labels": torch.arange(512) % 300}

    def loss(outputs: Mapping[str, Any], batch: Batch) -> torch.Tensor:
        return cross_entropy(outputs["logits"], batch["labels"])

    of_16 = {"logits": outputs, "others": (outputs, None)}
    expected = loss({"logits": outputs.float()}, batch)
    assert torch.equal(in_float32(loss)(of_16, batch), expected)
    assert float(loss(of_16, batch)) != float(expected)  # rounded to 8 bits
    of_64 = {"logits": outputs.double()}
    assert in_float32(loss)(of_64, batch).dtype is torch.float64
