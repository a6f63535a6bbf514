"""The split vocabulary against F.cross_entropy and F.embedding, in value and gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, embedding_bag

from autopar.runtime.ranks.mesh import Axis, start
from autopar.runtime.tensor.collectives import sum_gradients, sum_partials, take_shard
from autopar.runtime.tensor.slices import Parts, cut
from autopar.runtime.tensor.vocabulary import (
    split_logsumexp,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_embedding_bag,
)
from tests.cells import cells
from tests.runtime.processes import run_on_ranks

EVEN: Parts = ((12, 1),)
UNEVEN: Parts = ((11, 1),)
FUSED: Parts = ((3, 2), (4, 1))
FEWER_THAN_RANKS: Parts = ((2, 1),)


def _axis() -> Axis:
    return start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor


def _random(*shape: int) -> Tensor:
    return 5 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _targets(vocabulary: int) -> Tensor:
    target = torch.arange(14) % vocabulary
    target[::4] = -100
    return target.view(2, 7)


def _check_loss(parts: Parts, options: dict[str, Any]) -> None:
    axis = _axis()
    vocabulary = cut(parts, axis.size).whole
    whole = _random(2, 7, vocabulary).requires_grad_()
    ours = _random(2, 7, vocabulary).requires_grad_()
    target = _targets(vocabulary)
    if "ignore_index" in options:
        target = target.masked_fill(target == -100, options["ignore_index"])
    expected = cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    local = take_shard(ours, -1, axis, parts)
    found = vocab_parallel_cross_entropy(local, target, axis, parts=parts, **options)
    torch.testing.assert_close(found.flatten(), expected.view(-1), rtol=0, atol=1e-12)
    weights = _random(*expected.shape)
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    (found * weights.view(found.shape)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, whole.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
@pytest.mark.parametrize("parts", [EVEN, UNEVEN, FUSED, FEWER_THAN_RANKS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.3, "reduction": "none", "ignore_index": 1},
    ],
)
def test_the_split_loss_equals_the_whole_one(
    options: dict[str, Any], parts: Parts, size: int
) -> None:
    run_on_ranks(_check_loss, size, parts, options)


def _check_extremes() -> None:
    axis = _axis()
    logits = torch.full((2, 4), -torch.inf, dtype=torch.float64)
    logits[:, 0] = 1e4  # every other logit is masked, the whole second shard among them
    target = torch.zeros(2, dtype=torch.long)
    found = vocab_parallel_cross_entropy(
        take_shard(logits, -1, axis), target, axis, parts=((4, 1),)
    )
    assert found.item() == cross_entropy(logits, target).item() == 0.0
    nothing_valid = vocab_parallel_cross_entropy(
        take_shard(_random(2, 4), -1, axis), target - 100, axis, parts=((4, 1),)
    )
    assert nothing_valid.isnan()  # as F.cross_entropy
    with pytest.raises(RuntimeError, match="not one of 4 classes"):
        vocab_parallel_cross_entropy(
            take_shard(_random(2, 4), -1, axis), target + 4, axis, parts=((4, 1),)
        )


def test_extreme_logits_and_bad_targets_behave_as_in_torch() -> None:
    run_on_ranks(_check_extremes, 2)


def _check_bfloat16() -> None:
    axis = _axis()
    logits = _random(4, 12).bfloat16()
    target = torch.arange(4)
    found = vocab_parallel_cross_entropy(
        take_shard(logits, -1, axis), target, axis, parts=((12, 1),)
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), cross_entropy(logits.float(), target), rtol=0.01, atol=0
    )


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    run_on_ranks(_check_bfloat16, 2)


def _check_log_sum(parts: Parts, dim: int | tuple[int, ...], keepdim: bool) -> None:
    axis = _axis()
    shape = (3, cut(parts, axis.size).whole, 2)
    whole, ours = _random(*shape).requires_grad_(), _random(*shape).requires_grad_()
    expected = torch.logsumexp(whole, dim, keepdim=keepdim)
    found = split_logsumexp(take_shard(ours, 1, axis, parts), dim, axis, keepdim=keepdim)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    (expected.sin() * _random(*expected.shape)).sum().backward()  # type: ignore[no-untyped-call]
    (found.sin() * _random(*expected.shape)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, whole.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
@pytest.mark.parametrize("parts", [EVEN, UNEVEN, FUSED, FEWER_THAN_RANKS])
@pytest.mark.parametrize(("dim", "keepdim"), [(1, False), (-2, True), ((0, 1), False)])
def test_the_log_of_a_split_sum_of_exponentials_equals_the_whole_one(
    dim: int | tuple[int, ...], keepdim: bool, parts: Parts, size: int
) -> None:
    run_on_ranks(_check_log_sum, size, parts, dim, keepdim)


def _check_masked_log_sum() -> None:
    axis = _axis()
    whole = torch.full((2, 4), -torch.inf, dtype=torch.float64)
    whole[:, 0] = 1e4  # every other number is masked, the whole second shard among them
    whole.requires_grad_()
    found = split_logsumexp(take_shard(whole, -1, axis), -1, axis)
    assert found.tolist() == [1e4, 1e4]
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    assert whole.grad.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
    half = split_logsumexp(take_shard(_random(4, 12).bfloat16(), -1, axis), -1, axis)
    assert half.dtype == torch.bfloat16


def test_a_shard_may_be_masked_in_a_log_of_a_sum_of_exponentials() -> None:
    run_on_ranks(_check_masked_log_sum, 2)


def _check_embedding(parts: Parts, padding: int | None) -> None:
    axis = _axis()
    rows = cut(parts, axis.size).whole
    whole, ours = _random(rows, 3).requires_grad_(), _random(rows, 3).requires_grad_()
    ids = torch.arange(14).remainder(rows).view(2, 7)
    expected = embedding(ids, whole, padding)
    partial = vocab_parallel_embedding(ids, take_shard(ours, 0, axis, parts), axis, parts, padding)
    found = sum_partials(partial, axis)
    assert torch.equal(found, expected)
    expected.sin().sum().backward()  # type: ignore[no-untyped-call]
    found.sin().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, whole.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
@pytest.mark.parametrize("parts", [EVEN, UNEVEN, FUSED, FEWER_THAN_RANKS])
@pytest.mark.parametrize("padding", [None, 0, 1])
def test_the_split_embedding_equals_the_whole_one(
    padding: int | None, parts: Parts, size: int
) -> None:
    run_on_ranks(_check_embedding, size, parts, padding)


BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "weighed": {"mode": "sum", "per_sample_weights": True},
    "with the end": {"mode": "mean", "include_last_offset": True},
    "padded": {"mode": "mean", "padding_idx": 1},
    "padded and weighed": {"mode": "sum", "padding_idx": 0, "per_sample_weights": True},
}


def _check_bags(parts: Parts, options: dict[str, Any]) -> None:
    axis = _axis()
    rows = cut(parts, axis.size).whole
    ids = torch.arange(14).mul(5).remainder(rows)
    offsets = torch.tensor([0, 4, 4, 5, 9])  # the second bag is empty
    if options.get("include_last_offset"):
        offsets = torch.cat((offsets, torch.tensor([14])))
    found_grads = []
    results = []
    for is_split in (False, True):
        given, weight = dict(options), _random(rows, 3).requires_grad_()
        leaves = [weight]
        if options.get("per_sample_weights"):
            leaves.append(_random(14).requires_grad_())
            given["per_sample_weights"] = leaves[1]
        if is_split:
            if len(leaves) > 1:
                given["per_sample_weights"] = sum_gradients(leaves[1], axis)
            local = take_shard(weight, 0, axis, parts)
            partial = vocab_parallel_embedding_bag(ids, local, offsets, axis, parts=parts, **given)
            bags = sum_partials(partial, axis)
        else:
            bags = embedding_bag(ids, weight, offsets, **given)
        (bags.sin() * _random(*bags.shape)).sum().backward()  # type: ignore[no-untyped-call]
        results.append(bags)
        found_grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
    for found, expected in zip(found_grads[1], found_grads[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
@pytest.mark.parametrize("parts", [EVEN, UNEVEN, FEWER_THAN_RANKS])
@pytest.mark.parametrize("kind", BAGS)
def test_split_bags_equal_whole_ones(kind: str, parts: Parts, size: int) -> None:
    run_on_ranks(_check_bags, size, parts, BAGS[kind])


def test_one_rank_gets_the_plain_functions() -> None:
    alone, logits, target = Axis(0, 1, None), _random(2, 7, 11), _targets(11)
    found = vocab_parallel_cross_entropy(logits, target, alone, parts=UNEVEN, reduction="none")
    expected = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    assert torch.equal(found, expected.view(2, 7))
    ids = torch.tensor([1, 2])
    weight = _random(11, 3)
    assert torch.equal(vocab_parallel_embedding(ids, weight, alone, UNEVEN), weight[1:3])
