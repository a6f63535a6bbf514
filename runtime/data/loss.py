"""Weighs the losses of microbatches so that their sum is the mean over the whole global batch.

A mean over valid targets (ignore_index) is not the mean of the microbatches' means: a microbatch
with few valid targets would count too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autopar.runtime.data.batches import Batch, Weighed
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import summed

Found = TypeVar("Found")
Divisor: TypeAlias = Callable[[Tensor, float], Tensor]  # of counts, of so many parts together

_MOST_STEPS_BACK = 4  # from a loss to where it divides: casts, factors
MOST_STEPS_AHEAD = 4  # host memory holds their batches


def as_counted(counts: Tensor, _: float) -> Tensor:
    """Return by what a loss divides that is a mean over what counts."""
    return counts


def weighted(
    data: Iterator[Weighed],
    valid_targets: Callable[[Mapping[str, Any]], Tensor],
    mesh: Mesh,
    *,
    microbatches: int,
    divisor: Divisor = as_counted,
) -> Iterator[Weighed]:
    """Yield the microbatches of a rank with weights of means over what counts, in float64.

    The sum of a step's scaled losses, averaged over the data axis as gradients are, is the mean
    over all of its valid targets: scale_m = divisor(count_m) · data_size / divisor(Σ counts of all
    microbatches and ranks), where the loss of a batch divides by what `divisor` makes of its count.
    """
    ahead = _counted_ahead(data, valid_targets, mesh, microbatches=microbatches, divisor=divisor)
    return ((batch, share) for batch, _, share in ahead)


def weighted_terms(
    data: Iterator[Weighed],
    valid_targets: Callable[[Mapping[str, Any]], Tensor],
    mesh: Mesh,
    *,
    microbatches: int,
    divisor: Divisor = as_counted,
) -> Iterator[Weighed]:
    """Yield the microbatches of a rank with weights of the means that their losses add up.

    `valid_targets` counts those of each mean k. A microbatch keeps the weight that it has by its
    rows, so that of a mean is scale_mk over this one: w_mk · scale_m = scale_mk.
    """
    ahead = _counted_ahead(data, valid_targets, mesh, microbatches=microbatches, divisor=divisor)
    for batch, by_rows, shares in ahead:
        yield {**batch, "loss_weights": shares / by_rows.masked_fill(by_rows == 0, 1)}, by_rows


def _counted_ahead(
    data: Iterator[Weighed],
    valid_targets: Callable[[Mapping[str, Any]], Tensor],
    mesh: Mesh,
    *,
    microbatches: int,
    divisor: Divisor,
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Yield microbatches with their weights by rows, and by what counts: 0 where rows count 0.

    A batch is read with those of its step, then of the next two steps, four: their counts are
    summed over the ranks in one message. A message in each step took 0.3 ms of both cores of two
    gloo processes, and had all ranks wait for each other between forward and backward. What comes
    next is read one by one as batches are used, so that loading keeps pace.
    """
    steps, read = 1, list(islice(data, microbatches))
    while read:
        by_rows = torch.stack([weight for _, weight in read])
        own = torch.stack([valid_targets(Exact(batch)) for batch, _ in read])
        counts = own.to(mesh.device, non_blocking=True)  # else the host waits for the device
        counts = counts * (by_rows > 0).view(-1, *[1] * (counts.dim() - 1))
        shares = _shares(counts, divisor, microbatches, mesh.data).unbind()
        steps = min(2 * steps, MOST_STEPS_AHEAD)
        coming: list[Weighed] = []
        for used, (one, share) in enumerate(zip(read, shares, strict=True), start=1):
            wanted = steps * microbatches * used // len(read)
            coming += islice(data, wanted - len(coming))
            yield *one, share
        read = coming


def summed_rows(data: Iterator[Weighed], mesh: Mesh) -> Iterator[Weighed]:
    """Yield the microbatches of a rank with the weight of a loss that is a sum over rows.

    It stays a sum: over data ranks, losses and gradients are averaged.
    """
    return ((batch, (weight > 0) * float(mesh.data.size)) for batch, weight in data)


class Exact(Mapping[str, Any]):
    """A batch whose fractions are in float64, as soon as they are asked for: weights add up."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        value = self._batch[name]
        is_fraction = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_fraction else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def _shares(counts: Tensor, divisor: Divisor, microbatches: int, axis: Axis) -> Tensor:
    """Divide by the divisor of a step those of its microbatches, and by the mean over the ranks."""
    by_step = counts.double().view(-1, microbatches, *counts.shape[1:])
    own = by_step.sum(1, keepdim=True)
    whole = own if axis.size == 1 else summed(own, axis)
    total = divisor(whole, microbatches * axis.size)
    total = total.masked_fill(total == 0, 1)  # counts may be weights, and all less than one
    return (divisor(by_step, 1) * axis.size / total).flatten(0, 1)


def scale_loss(loss: Tensor, scale: Tensor) -> Tensor:
    """Scale a mean loss; the mean of no targets is not a number and counts nothing.

    The result is wide where the loss has 16 bits, in which neither sums nor scaled losses fit.
    """
    wide = torch.promote_types(loss.dtype, torch.float32)
    send_nothing_back(loss, scale)
    return loss.masked_fill(scale == 0, 0).to(wide) * scale.to(wide)


def send_nothing_back(loss: Tensor, scale: Tensor) -> None:
    """Have a mean that divides by its count send no gradient where that is 0: 0 ÷ 0 is none."""

    def sent(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(one if one is None else one.masked_fill(scale == 0, 0) for one in gradients)

    node: Any = loss.grad_fn
    for _ in range(_MOST_STEPS_BACK):
        if node is None:
            return
        if node.name() == "DivBackward0":
            node.register_hook(sent)
            return
        node = next((before for before, _ in node.next_functions), None)


def in_float32(loss: Callable[..., Found]) -> Callable[..., Found]:
    """Return a loss that takes outputs in 16 bits, in which no sum or mean fits, as float32."""

    @wraps(loss)
    def wide(outputs: Any, batch: Batch) -> Found:
        return loss(tree_map_only(Tensor, _wide, outputs), batch)

    return wide


def with_plain(loss: Callable[..., Found], **plain: Any) -> Callable[..., Found]:
    """Return a loss that finds in its batch what is no tensor, and the same for every batch."""

    @wraps(loss)
    def given(outputs: Any, batch: Mapping[str, Any]) -> Found:
        return loss(outputs, {**batch, **plain})

    return given


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def loss_in(outputs: Any) -> Tensor:
    """Return the loss in what a model returned: alone, first, or as `loss`."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        outputs = outputs["loss"]
    elif not isinstance(outputs, Tensor) and getattr(outputs, "loss", None) is not None:
        outputs = outputs.loss
    elif isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    assert isinstance(outputs, Tensor)  # planning has seen it
    return outputs


def mean_loss(own: Tensor, mesh: Mesh) -> float:
    """Return the loss of the step on every rank, from each rank's sum of its scaled losses.

    It is zero on all but the last pipeline stage, and the same on the ranks of the tensor axis.
    """
    total = own.detach().double().reshape(1)
    if mesh.world.size > 1:
        total = summed(total, mesh.world)
    return float(total) / (mesh.data.size * mesh.tensor.size)
