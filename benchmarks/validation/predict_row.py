"""Predicts one published run: its settings, its model's layers, its stages, its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.prediction import (
    LayerCost,
    Prediction,
    Recompute,
    StagePrediction,
)
from autopar.planner.costs.steps.step import predict
from benchmarks.validation.host_work import PublishedConstants
from benchmarks.validation.machines import cluster_of
from benchmarks.validation.models import shape_of
from benchmarks.validation.pricing import Kind, Priced, priced
from benchmarks.validation.settings import Remade, Settings, settings_of
from benchmarks.validation.table import Row, stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One run: its row, its settings, and its prediction."""

    row: Row
    settings: Settings
    prediction: Prediction


def predict_row(row: Row, zoo: Path, constants: PublishedConstants) -> Predicted:
    """Return the prediction of a row that is not to be skipped."""
    settings = settings_of(row)
    arrangement = settings.arrangement
    cluster = cluster_of(
        row.gpu, stated(row.gpus), stated(row.gpus_per_node), row.intra_bw, row.inter_bw
    )
    kind = Kind(
        device=cluster.nodes[0].device,
        microbatch=arrangement.microbatch,
        shape=group_shape(cluster, arrangement.tensor, 1),
        is_sequence_parallel=settings.is_sequence_parallel,
        practice=settings.practice,
        host=constants.host,
        is_one_stage=arrangement.pipeline == 1,
    )
    costs = _as_run_all(priced(zoo, shape_of(row, dropout=settings.dropout), kind), settings)
    prediction = predict(
        stages_of(
            costs,
            stated(row.layers),
            stages=arrangement.pipeline * arrangement.stages_per_rank,
            remade=settings.remade,
        ),
        arrangement,
        cluster,
        constants=replace(
            constants, gathers_ahead=True, fuses_gradients=settings.practice.fuses_gradients
        ),
        model_flops=0,
        tied_gradient_bytes=costs.tied_gradient_bytes,
    )
    if settings.has_both_gradients:
        stages = (_with_both_gradients(stage, constants) for stage in prediction.stages)
        prediction = replace(prediction, stages=tuple(stages))
    return Predicted(row=row, settings=settings, prediction=prediction)


def _with_both_gradients(stage: StagePrediction, constants: PublishedConstants) -> StagePrediction:
    """Return a stage that holds 16-bit gradients beside its 32-bit gradients."""
    memory = stage.memory
    narrow = memory.gradient_bytes // 2
    more = replace(
        memory,
        gradient_bytes=memory.gradient_bytes + narrow,
        margin_bytes=memory.margin_bytes + round(constants.margin * narrow),
    )
    return replace(stage, memory=more)


def _as_run_all(costs: Priced, settings: Settings) -> Priced:
    tied = costs.tied_gradient_bytes
    return replace(
        costs,
        before=tuple(_as_run(cost, settings) for cost in costs.before),
        block={mode: _as_run(cost, settings) for mode, cost in costs.block.items()},
        after=tuple(_as_run(cost, settings) for cost in costs.after),
        tied_gradient_bytes=tied // 2 if settings.has_narrow_gradients else tied,
    )


def _as_run(cost: LayerCost, settings: Settings) -> LayerCost:
    """Return the cost of a layer with what the run sent and held.

    Between stages, each tensor rank sends its part of a tensor that all of them hold, and the
    receiving ranks gather the parts. Gradients of 16 bits have a 32-bit copy beside the optimizer's
    state.
    """
    tensor = 1 if settings.is_sequence_parallel else settings.arrangement.tensor
    narrow = cost.gradient_bytes // 2 if settings.has_narrow_gradients else cost.gradient_bytes
    copy = cost.gradient_bytes if settings.has_narrow_gradients else 0
    return replace(
        cost,
        output_bytes=cost.output_bytes // tensor,
        gradient_bytes=narrow,
        learned_gradient_bytes=0 if settings.adds_in_products else cost.learned_gradient_bytes,
        optimizer_bytes=cost.optimizer_bytes + copy,
    )


def stages_of(
    costs: Priced, layers: int, *, stages: int, remade: Remade
) -> tuple[tuple[LayerCost, ...], ...]:
    """Return the layers of each stage, including those before and after the repeated ones."""
    cut = [
        [costs.block[mode] for mode in _modes(remade, count)]
        for count in layers_per_stage(layers, stages)
    ]
    cut[0] = [*costs.before, *cut[0]]
    cut[-1] = [*cut[-1], *costs.after]
    return tuple(map(tuple, cut))


def _modes(remade: Remade, count: int) -> Sequence[Recompute]:
    """Return the modes of a stage's layers; attention's own recomputation is in its price."""
    if remade.attention_only:
        return [Recompute.NONE] * count
    return [(remade.recompute, remade.second)[position % 2] for position in range(count)]


def layers_per_stage(layers: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has: equally many or, as is usual, fewer at the ends.

    The remainder goes to the middle stages, because the first has the embedding and the last the
    head: 70 layers on 12 stages are 5, ten times 6, 5.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: min(stage, stages - 1 - stage) == 0)
    richer = set(middle_first[:extra])
    return tuple(base + (stage in richer) for stage in range(stages))
