"""Tells what was chosen for a training because nobody said it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.plan.plan import Plan

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.1, 1.0
ROWS_PER_DEVICE = 8  # of the global batch, where none is declared


def chosen(plan: Plan) -> Iterator[str]:
    """Yield each choice, and how to make another."""
    rows, devices = plan.arrangement.global_batch, plan.machines.devices
    is_declared = any(one.field == "global_batch" for one in plan.constraints)
    if (
        not is_declared
        and plan.graph.fixed_batch is None
        and not rows % (ROWS_PER_DEVICE * devices)
    ):
        yield f"{rows // devices} rows for each device (--global-batch)"
    if not plan.model.has_optimizer:
        yield (
            f"AdamW at a rate of {LEARNING_RATE:g} with a decay of {WEIGHT_DECAY:g} "
            "(build_optimizer)"
        )
    yield f"gradients clipped to a norm of {CLIP_NORM:g} (CLIP_NORM)"
    if not plan.model.has_dataset:
        yield "one random batch, which the model learns by heart (build_dataset)"
