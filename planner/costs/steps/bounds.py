"""A bound of a step's time that holds before anything is solved; the search prunes by it.

It takes a total over all layers and holds for every way to cut the layers into stages.
"""

from __future__ import annotations

from autopar.planner.costs.prediction import Arrangement


def least_step_seconds(layers_seconds: float, arrangement: Arrangement) -> float:
    """Return what no cut of the layers beats, given forward and backward of one microbatch.

    GPipe and 1F1B: stage s computes nothing before the first microbatch has passed the stages
    before it, nor after it has begun its way back through them, so T ≥ Σ_{j<s} t_j + m·t_s. Were
    all p of these equal, with Σ t = L:

        T = L ÷ (1 − (1 − 1/m)^p)

    and no other cut makes the greatest of them smaller. Other schedules: m·L ÷ p. Leaves out every
    communication, the optimizer and the framework.
    """
    microbatches, ranks = arrangement.microbatches, arrangement.pipeline
    if ranks == 1:
        return microbatches * layers_seconds
    if arrangement.schedule.has_closed_form:
        return layers_seconds / (1.0 - (1.0 - 1.0 / microbatches) ** ranks)
    return max(layers_seconds, microbatches * layers_seconds / ranks)
