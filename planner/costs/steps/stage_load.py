"""Sums the layers of a stage into what the stage computes, sends, holds and reduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from autopar.planner.costs.collectives.norm_statistics import Statistics
from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.steps.overlap import LayerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Equal layers in a row, as far as ranks that share the data are concerned."""

    load: LayerLoad
    statistics: Statistics
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What equal layers take while they run; with ZeRO-3 the one before is gathered already."""

    cost: LayerCost
    count: int
    next_parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage: the seconds of one microbatch, and what its parameters weigh on one rank."""

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    communication_seconds: float
    recompute_seconds: float
    measured_seconds: float
    saved_bytes: int
    output_bytes: int
    trainable: int
    trainable_tensors: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    replicated_gradient_bytes: int
    deferred_bytes: int
    works: tuple[Work, ...]  # in the order of the layers
    layers: tuple[Repeated, ...]

    @property
    def seconds(self) -> float:
        """Of one microbatch, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def splits_backward(self) -> bool:
        """Whether a schedule may make it in two halves, which would compute again twice."""
        return not self.recompute_seconds

    def stage_seconds(
        self, *, forward_more: float, backward_more: float, action_seconds: float, splits: bool
    ) -> StageSeconds:
        """Return what a schedule needs to know, with what passes wait for and actions take.

        `splits` says whether it is called for both halves of its backward. One that computes
        activations again does all in the first.
        """
        backward = self.backward_seconds + backward_more + action_seconds
        whole = StageSeconds(
            forward_seconds=self.forward_seconds + forward_more + action_seconds,
            backward_seconds=backward,
            input_gradient_seconds=backward,
            weight_gradient_seconds=action_seconds if splits else 0.0,
        )
        if not (splits and self.splits_backward):
            return whole
        return replace(
            whole,
            input_gradient_seconds=backward - self.weight_gradient_seconds,
            weight_gradient_seconds=self.weight_gradient_seconds + action_seconds,
        )


# What a stage has of each layer's cost, under the same name.
_SUMMED = {one.name for one in fields(StageLoad)} & {one.name for one in fields(LayerCost)} - {
    "output_bytes"
}


def stage_load(layers: Sequence[LayerCost]) -> StageLoad:
    """Return the sums over the layers of one stage; a row of one object is summed at once."""
    runs = tuple(_runs(layers))

    sums = {name: sum(count * getattr(cost, name) for cost, count in runs) for name in _SUMMED}
    return StageLoad(
        **sums,
        output_bytes=layers[-1].output_bytes if layers else 0,
        works=tuple(_works(runs)),
        layers=tuple(
            Repeated(load=_load(cost), statistics=cost.statistics, count=count)
            for cost, count in runs
        ),
    )


def _runs(layers: Sequence[LayerCost]) -> Iterator[tuple[LayerCost, int]]:
    for _, group in groupby(layers, key=id):
        alike = list(group)
        yield alike[0], len(alike)


def _works(runs: Sequence[tuple[LayerCost, int]]) -> Iterator[Work]:
    before = 0
    for cost, count in runs:
        yield Work(cost=cost, count=1, next_parameter_bytes=before)
        before = cost.parameter_bytes
        if count > 1:
            yield Work(cost=cost, count=count - 1, next_parameter_bytes=before)


def _load(cost: LayerCost) -> LayerLoad:
    return LayerLoad(
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        parameter_bytes=cost.parameter_bytes,
        gradient_bytes=cost.gradient_bytes,
    )
