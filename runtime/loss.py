"""Weighs the losses of microbatches so that their sum is the mean over the whole global batch.

A mean over valid targets (ignore_index) is not the mean of the microbatches' means: a microbatch
with few valid targets would count too much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from autopar.runtime.data import Batch
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.transport import ComingSum, summed


class ComingWeights:
    """The factors of all microbatches, once the other ranks' counts of valid targets are here."""

    def __init__(self, counts: Tensor, axis: Axis) -> None:
        self._shares = counts.double() * axis.size
        self._total = ComingSum(counts.sum(), axis)

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """The factors, in float64."""
        return (self._shares / _or_one(self._total.value())).unbind()


@dataclass(frozen=True, slots=True, eq=False)
class LossWeight:
    """A factor for a microbatch's mean loss, from its number of valid targets."""

    weights: ComingWeights
    microbatch: int

    def value(self) -> Tensor:
        """Return the factor in float64; the first call waits for the other ranks' counts."""
        return self.weights.values[self.microbatch]


def loss_scales(counts: Tensor, mesh: Mesh) -> tuple[LossWeight, ...]:
    """Return a factor for each microbatch's mean loss, from its number of valid targets.

    The sum of the scaled losses, averaged over the data axis as gradients are, is the mean over
    all valid targets: scale_i = count_i · data_size / Σ counts of all microbatches and ranks. The
    counts are summed beside the forward, whose loss is the first to need them.
    """
    weights = ComingWeights(counts, mesh.data)
    return tuple(LossWeight(weights, number) for number in range(len(counts)))


def weighed(microbatches: Sequence[Batch], counts: Tensor, mesh: Mesh) -> list[Batch]:
    """Return the microbatches of a rank with weights of the means that their losses add up.

    `counts[m, k]` are the valid targets of mean k. The average over microbatches and data ranks of
    w_mk · mean_k is the mean over all valid targets: w_mk = count_mk · M · data_size / Σ counts_k.
    """
    own = counts.sum(0)
    total = _or_one(own if mesh.data.size == 1 else summed(own, mesh.data))
    weights = counts.double() * (len(microbatches) * mesh.data.size) / total
    return [
        {**batch, "loss_weights": own}
        for batch, own in zip(microbatches, weights.unbind(), strict=True)
    ]


def _or_one(total: Tensor) -> Tensor:
    """Return what is divided by: counts may be weights, so that less than one is all there is."""
    return total.masked_fill(total == 0, 1)


def scale_loss(loss: Tensor, scale: LossWeight | Tensor) -> Tensor:
    """Scale a mean loss; the mean of no targets is not a number and counts nothing."""
    factor = scale.value() if isinstance(scale, LossWeight) else scale
    return loss.masked_fill(factor == 0, 0) * factor.to(loss.dtype)


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
