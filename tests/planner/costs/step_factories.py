"""Makes layers and arrangements for the tests of steps, memory and bounds."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.costs.prediction import Arrangement, LayerCost, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.precision import Compression, Precision

LAYER = LayerCost(
    forward_seconds=1e-3,
    backward_seconds=2e-3,
    weight_gradient_seconds=1e-3,
    communication_seconds=0.0,
    recompute_seconds=0.0,
    saved_bytes=100,
    transient_bytes=40,
    output_bytes=1_000_000,
    parameters=1_000_000,
    parameter_bytes=2_000_000,
    gradient_bytes=4_000_000,
    optimizer_bytes=12_000_000,
    trainable=1_000_000,
    replicated_gradient_bytes=0,
    measured_seconds=0.0,
    learning_bytes=40,
    deferred_bytes=30,
)
ARRANGEMENT = Arrangement(
    pipeline=1,
    data=1,
    tensor=1,
    shard=1,
    microbatch=1,
    microbatches=1,
    schedule=ScheduleKind.ONE_F_ONE_B,
    stages_per_rank=1,
    zero=Zero.NONE,
    bucket_bytes=25_000_000,
    compression=Compression.NONE,
    precision=Precision.BF16,
)
# Nothing but what the test puts in.
SILENT = FrameworkConstants(
    step_seconds=0.0,
    action_seconds=0.0,
    overlap_slowdown=0.0,
    cpu_overlap_slowdown=0.0,
    context_bytes=0,
    communicator_bytes=0,
    pair_bytes=0,
    process_bytes=0,
    host_memory_share=0.65,
    host_link_share=0.8,
    margin=0.0,
    fuses_gradients=True,
)


def layer(**changes: float) -> LayerCost:
    """Return the usual layer with some figures changed."""
    return replace(LAYER, **changes)  # type: ignore[arg-type]
