"""Finds out whether fewer of some devices would be as fast, in a small part of a search's time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.prefix import first_devices, prefix_sizes
from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.fleet.curve import Fewer
from autopar.planner.plan.fleet.training import Training
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.best_first import Found, Node, Unproved, best_first
from autopar.planner.plan.search.nodes import Item
from autopar.planner.plan.search.search import Explorer, completed
from autopar.planner.plan.solving.candidate import Candidate
from autopar.planner.plan.solving.costing import Prices, Subject

_MOST_COUNTS = 4  # that are looked at
_MOST_NODES = 100  # of the search on one of them
_LEAST_SAVED = 0.1  # of the devices: less is within what predictions are off by
_SHARE_OF_PEAK = 0.9  # that no training is above

Entry = Node[Item] | Found[Candidate] | Unproved


def fewer_as_fast(
    training: Training, cluster: Cluster, plan: Plan, *, prices: Prices | None = None
) -> Fewer | None:
    """Return the fastest of fewer devices whose step is at most the plan's with its tolerance.

    Half as many devices and so on are looked at, powers of two, and a node less where there are
    few; those whose step cannot be so short are left out by the bounds of the search.
    """
    constraints = completed(training.constraints, cluster, training.graph)
    exact = replace(training, constraints=replace(constraints, tolerance=0.0))
    within = plan.prediction.step_seconds * (1 + constraints.tolerance)
    best: Fewer | None = None
    for count in _counts(cluster, plan, within):
        found = _fastest_below(within, exact, first_devices(cluster, count), prices)
        if found is not None:
            within = found.prediction.step_seconds
            best = Fewer(devices=count, step_seconds=within)
    return best


def _counts(cluster: Cluster, plan: Plan, within: float) -> Iterator[int]:
    """Yield numbers of devices to look at, the most first, but for those that are too few by far.

    Were they to compute at most of their peak, they would still take too long.
    """
    prediction, every = plan.prediction, prefix_sizes(cluster)
    least = prediction.mfu / _SHARE_OF_PEAK * plan.machines.devices
    least *= prediction.step_seconds / within
    powers = range(1, cluster.size.bit_length())
    wanted = {2**power for power in powers} | {cluster.size // 2**power for power in powers} | {1}
    if len(cluster.nodes) > 1:
        wanted.add(every[-2])
    most = (1 - _LEAST_SAVED) * cluster.size
    wanted = {count for count in wanted if count in every[:-1] and count <= most}
    yield from sorted((count for count in wanted if count >= least), reverse=True)[:_MOST_COUNTS]


def _fastest_below(
    seconds: float, training: Training, cluster: Cluster, prices: Prices | None
) -> Candidate | None:
    """Return the fastest candidate that takes at most some seconds, as far as is looked."""
    subject = Subject(graph=training.graph, axes=training.axes, layers=training.layers)
    explorer = Explorer(
        subject, cluster, training.constraints, measured=training.measured, prices=prices
    )
    explorer.know(seconds)

    def near(entries: Iterable[Entry]) -> Iterator[Entry]:
        return (
            one
            for one in entries
            if (one.value if isinstance(one, Found) else one.bound) <= seconds
        )

    looked = iter(range(_MOST_NODES))
    try:
        roots = [one for one in near(explorer.roots()) if isinstance(one, Node)]
    except InfeasibleError:  # no degrees for so many devices
        return None
    found = best_first(
        roots,
        lambda item: near(explorer.expand(item)),
        is_late=lambda: next(looked, None) is None,
    ).found
    return found[0].leaf if found else None
