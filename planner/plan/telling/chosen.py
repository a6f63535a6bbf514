"""Tells what was chosen for a training because nobody said it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.planner.plan.plan import Plan

CLIP_NORM = 1.0
ROWS_PER_DEVICE = 8  # of the global batch, where none is declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """AdamW and its learning rates, where a model file has no optimizer: as language models have.

    Scripts have these settings under the same names in capitals.
    """

    learning_rate: float = 3e-4  # the highest
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # of matrices alone
    warmup_steps: int = 2000  # a tenth of all steps at most
    final_share: float = 0.1  # of the highest rate, in the last step


USUAL = Usual()


def is_scheduled_here(plan: Plan) -> bool:
    """Whether scripts have a schedule of their own: a model file's optimizer is its author's."""
    return not plan.model.has_optimizer and not plan.model.has_scheduler


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
            f"AdamW with a rate of {USUAL.learning_rate:g}, betas of {USUAL.betas[0]:g} and "
            f"{USUAL.betas[1]:g}, and a decay of {USUAL.weight_decay:g} for matrices alone "
            "(build_optimizer)"
        )
    if is_scheduled_here(plan):
        yield (
            f"a warm-up to that rate over {USUAL.warmup_steps:,} steps, a tenth of all at most, "
            f"and a cosine from it down to {USUAL.final_share:g} of it (build_scheduler)"
        )
    yield f"gradients clipped to a norm of {CLIP_NORM:g} (CLIP_NORM)"
    if not plan.model.has_dataset:
        yield "one random batch, which the model learns by heart (build_dataset)"
