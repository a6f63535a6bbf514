"""Reads microbatches, and weights their losses so that they add up to the global batch's loss.

A mean over valid targets (ignore_index) is not the mean of the microbatches' means: a microbatch
with few valid targets would count too much.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autopar.runtime.data.batches import (
    Batch,
    Example,
    Weighed,
    dataset_batches,
    gathered_rows,
    synthetic_batches,
    weights_of,
)
from autopar.runtime.data.epochs import Dealing, RowCounts, each_rank, epochs_of
from autopar.runtime.data.rows import Collate, to_device
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.transport import gathered, summed

__all__ = ["in_float32", "loss_in", "mean_loss", "read_batches", "scale_loss", "with_plain"]

Found = TypeVar("Found")
Counting: TypeAlias = Callable[[Mapping[str, Any]], Tensor]
# (counts, number of parts that they come from) → the loss's divisor
Divisor: TypeAlias = Callable[[Tensor, float], Tensor]

_MOST_STEPS_BACK = 4  # of autograd, from a loss to its division: casts, factors
MOST_STEPS_AHEAD = 4  # steps read ahead: few, because host memory holds their batches


def as_counted(counts: Tensor, _: float) -> Tensor:
    """Return the divisor of a loss that is a mean over valid targets: their count."""
    return counts


def read_batches(
    example_batch: Example,
    options: Namespace,
    mesh: Mesh,
    *,
    rows: tuple[int, RowCounts],
    rows_over: Axis = ALONE,
    own: Collection[str] = (),
    targets: Counting | None = None,
    terms: Counting | None = None,
    divisor: Divisor = as_counted,
    sums_rows: bool = False,
    channels_last: Collection[str] = (),
    dataset: Any = None,
    new_collate: Callable[[], Collate] | None = None,
    skip: int = 0,
    fewest: int = 1,
    may_repeat: bool = True,
) -> Iterator[Weighed]:
    """Yield this rank's microbatches on its device, with the weights of their losses.

    `rows` is the number of microbatches in a step, and the rows of each. At the end of an epoch a
    microbatch may have fewer rows, but at least `fewest`. A rank without rows for a microbatch
    repeats another row with weight 0, if the model allows it (`may_repeat`). Along the axis
    `rows_over`, each rank reads a share of the rows and gathers the others; of keys in `own` it
    keeps its share.

    Each rank adds up its weighted losses, and the mean of these sums over ranks is the loss of the
    step. A loss that is a mean over rows is weighted by them, a mean over valid targets by their
    count (`targets`), a loss that adds several means by the count of each mean (`terms`); `divisor`
    maps a count to the loss's divisor. `sums_rows` is for a loss that is a sum over rows.
    """
    microbatches, microbatch = rows
    each = tuple(each_rank(microbatch, mesh.data))
    dealing = Dealing(
        each=each,
        rank=mesh.data.rank,
        microbatches=microbatches,
        fewest=fewest,
        may_repeat=may_repeat,
    )
    epochs = epochs_of(dataset, options, dealing.per_step)
    if dataset is None:
        read = synthetic_batches(
            example_batch, mesh, rows=rows, seed=options.seed, rows_over=rows_over
        )
    else:
        read = dataset_batches(
            dataset,
            example_batch,
            mesh,
            dealing=dealing,
            epochs=epochs,
            seed=options.seed,
            skip=skip,
            workers=options.workers,
            rows_over=rows_over,
            new_collate=new_collate,
        )
    data: Iterator[Weighed] = zip(
        read, weights_of(dealing.parts(epochs, skip), mesh.device), strict=False
    )
    if (counting := targets or terms) is not None:
        data = weighted(data, counting, mesh, microbatches=microbatches, divisor=divisor)
    elif sums_rows:
        data = summed_rows(data, mesh)
    moved = partial(to_device, mesh=mesh, dtype=options.dtype, channels_last=channels_last)
    return (
        (gathered_rows(moved(batch), own, rows_over, rows=dealing.size), scale)
        for batch, scale in data
    )


def weighted(
    data: Iterator[Weighed],
    valid_targets: Counting,
    mesh: Mesh,
    *,
    microbatches: int,
    divisor: Divisor = as_counted,
) -> Iterator[Weighed]:
    """Yield a rank's microbatches with float64 weights for a mean over valid targets.

    The sum of a step's scaled losses, averaged over the data axis like gradients, is the mean over
    all of its valid targets: scale_m = divisor(count_m) · data_size / divisor(Σ counts of all
    microbatches and ranks). `divisor` maps a count to the loss's divisor. A microbatch that only
    repeats rows (weight 0) counts no targets.

    If a loss adds several means, `valid_targets` returns a count for each. The microbatch then
    keeps its weight by rows, and its `loss_weights` are relative to it: the scale of each mean ÷
    the weight by rows.

    Batches are read one step ahead, then two, then four. The counts of several steps are summed
    over ranks in one message. (One message per step took 0.3 ms on two gloo processes, and made all
    ranks wait between forward and backward.) The next batches are read one by one while these are
    used, so that loading keeps pace.
    """
    steps, read = 1, list(islice(data, microbatches))
    while read:
        by_rows = torch.stack([weight for _, weight in read])
        own = torch.stack([valid_targets(ExactBatch(batch)) for batch, _ in read])
        # non-blocking, so that the host does not wait
        counts = own.to(mesh.device, non_blocking=True)
        counts = counts * (by_rows > 0).view(-1, *[1] * (counts.dim() - 1))
        shares = _shares(counts, divisor, microbatches, mesh.data).unbind()
        steps = min(2 * steps, MOST_STEPS_AHEAD)
        coming: list[Weighed] = []
        for used, ((batch, weight), share) in enumerate(zip(read, shares, strict=True), start=1):
            wanted = steps * microbatches * used // len(read)
            coming += islice(data, wanted - len(coming))
            if share.dim():
                relative = share / weight.masked_fill(weight == 0, 1)
                yield {**batch, "loss_weights": relative}, weight
            else:
                yield batch, share
        read = coming


def summed_rows(data: Iterator[Weighed], mesh: Mesh) -> Iterator[Weighed]:
    """Yield a rank's microbatches with the weight for a loss that is a sum over rows.

    Losses and gradients are averaged over data ranks, so the weight undoes the averaging.
    """
    return ((batch, (weight > 0) * float(mesh.data.size)) for batch, weight in data)


class ExactBatch(Mapping[str, Any]):
    """A batch whose floating tensors are read as float64, so that their sums are exact."""

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
    """Return divisor(count) · ranks ÷ divisor(Σ counts of the step) for each microbatch."""
    by_step = counts.double().view(-1, microbatches, *counts.shape[1:])
    own = by_step.sum(1, keepdim=True)
    total = divisor(summed(own, axis), microbatches * axis.size)
    # counts may be fractional weights, so a total below 1 is valid
    total = total.masked_fill(total == 0, 1)
    return (divisor(by_step, 1) * axis.size / total).flatten(0, 1)


def scale_loss(loss: Tensor, scale: Tensor) -> Tensor:
    """Scale a mean loss. A mean over no targets would be nan; it counts as 0.

    A 16-bit loss becomes float32, because sums and scaled losses do not fit 16 bits.
    """
    wide = torch.promote_types(loss.dtype, torch.float32)
    send_nothing_back(loss, scale)
    return loss.masked_fill(scale == 0, 0).to(wide) * scale.to(wide)


def send_nothing_back(loss: Tensor, scale: Tensor) -> None:
    """Make the gradient of a mean over no targets zero; that of 0 ÷ 0 would be nan."""

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
    """Wrap a loss so that it takes 16-bit outputs as float32, where sums and means fit."""

    @wraps(loss)
    def wide(outputs: Any, batch: Batch) -> Found:
        return loss(tree_map_only(Tensor, _wide, outputs), batch)

    return wide


def with_plain(loss: Callable[..., Found], **plain: Any) -> Callable[..., Found]:
    """Wrap a loss so that its batch also has these constant entries, which are no tensors."""

    @wraps(loss)
    def given(outputs: Any, batch: Mapping[str, Any]) -> Found:
        return loss(outputs, {**batch, **plain})

    return given


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def loss_in(outputs: Any) -> Tensor:
    """Return the loss from a model's output: a tensor, the first item, or the field `loss`."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        outputs = outputs["loss"]
    elif not isinstance(outputs, Tensor) and getattr(outputs, "loss", None) is not None:
        outputs = outputs.loss
    elif isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    assert isinstance(outputs, Tensor)  # checked by the planner
    return outputs


def mean_loss(own: Tensor, mesh: Mesh) -> float:
    """Return the loss of the step on every rank, from each rank's sum of scaled losses.

    The sum is zero except on the last pipeline stage, and equal on the ranks of the tensor axis.
    """
    total = summed(own.detach().double().reshape(1), mesh.world)
    return float(total) / (mesh.data.size * mesh.tensor.size)


def largest_norm(own: Tensor, mesh: Mesh) -> float:
    """Return the gradients' norm on every rank: with local steps, the largest of all replicas.

    If it is nan on one replica, it is nan on every rank.
    """
    if mesh.sync_every and mesh.replica.size > 1:
        own = gathered(own.detach().double().reshape(1), mesh.replica).max()
    return float(own)
