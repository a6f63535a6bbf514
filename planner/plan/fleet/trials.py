"""Plans one training on several clusters; what is equal on them is priced and laid out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.errors import AutoparError, InfeasibleError, TimeLimitError
from autopar.planner.plan.fleet.curve import Curve, Trial, curve_of
from autopar.planner.plan.fleet.training import Training
from autopar.planner.plan.search.search import search, with_batch
from autopar.planner.plan.solving.costing import Prices


def planned_curve(
    training: Training,
    clusters: Sequence[Cluster],
    *,
    time_limit_seconds: float | None = None,
    report: Callable[[str], None] = lambda _: None,
    prices: Prices | None = None,
) -> Curve:
    """Return the plans on clusters of ascending sizes; raise the last refusal where none has one.

    All train the same: where no global batch is declared, the largest cluster's is taken. Each gets
    an equal share of the time that is left.
    """
    whole = with_batch(training.constraints, clusters[-1], training.graph)
    training = replace(training, constraints=whole)
    prices, refusals = prices or Prices(), list[AutoparError]()
    began, spent = time.perf_counter(), 0.0

    def told(size: int) -> Callable[[str], None]:
        if len(clusters) == 1:
            return report
        return lambda text: report(f"{size} devices: {text}")

    def trials() -> Iterator[Trial]:
        nonlocal spent
        for number, cluster in enumerate(clusters):
            size, limit = cluster.size, None
            if time_limit_seconds is not None:
                left = max(time_limit_seconds - spent, 1e-9)
                limit = left / (len(clusters) - number)
            try:
                plan = search(
                    training.graph,
                    training.axes,
                    training.layers,
                    training.model,
                    cluster,
                    training.constraints,
                    time_limit_seconds=limit,
                    report=told(size),
                    measured=training.measured,
                    prices=prices,
                )
                yield Trial(devices=size, plan=plan)
            except (InfeasibleError, TimeLimitError) as error:
                refusals.append(error)
                yield Trial(devices=size, plan=None, refusal=error.found)
            spent = time.perf_counter() - began

    made = tuple(trials())
    if all(one.plan is None for one in made):
        raise refusals[-1]
    return curve_of(made, training.constraints)
