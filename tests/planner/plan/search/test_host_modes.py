"""The search uses the host's memory only where that pays, or where nothing else fits.

Every mode of every layer, with every place of the optimizer, is priced on one device; none of the
search's bounds, mixes or programs is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.costs.steps.framework import framework_constants
from autopar.planner.costs.steps.step import predict
from autopar.planner.plan.declared.constraints import HostSaving
from autopar.planner.plan.declared.limits import with_batch
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.costing import SearchSubject
from tests.planner.plan.plans import parts_of
from tests.planner.plan.searches import declared, planned

GPT2 = ("gpt2.py", "size=124m", "layers=2")
H100 = choose_cluster(1, "h100-sxm")
PLACES: dict[str, Any] = {"global_batch": 8, "pins__microbatch": 8, "compile": "none"}
SMALL = (0, 1, 4)  # both embeddings and the last norm hold little: they take one mode together
NEAR = 1.005  # layers on the host beside an optimizer there may save so little: nobody looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A mode for each layer, the place of the optimizer, and what that comes to."""

    arrangement: Arrangement
    modes: tuple[Recompute, ...]
    seconds: float
    device_bytes: int

    @property
    def steps_there(self) -> bool:
        return self.arrangement.offload.has_states

    @property
    def has_full_host(self) -> bool:
        return Recompute.FULL_HOST in self.modes


@cache
def ways() -> tuple[Way, ...]:
    """Price every way, the fastest first."""
    return tuple(sorted(_ways(), key=lambda one: one.seconds))


def _ways() -> Iterator[Way]:
    graph, axes, layers = parts_of(*GPT2)
    constraints = with_batch(declared(**PLACES), H100, graph)
    explorer = Explorer(
        SearchSubject(graph=graph, axes=axes, layers=layers),
        H100,
        replace(constraints, host_saving=HostSaving.ALWAYS),
    )
    constants = framework_constants((H100.nodes[0].device,), None)
    for point in explorer.points:
        for arrangement in explorer.points.variants(point):
            (rows,) = explorer.solver.questions.rows(arrangement, 0)
            allowed = explorer.solver.demands.modes
            every = [
                [mode for mode in own if mode in some]
                for own, some in zip(rows, allowed, strict=True)
            ]
            for modes in product(*every):
                if len({modes[place] for place in SMALL}) > 1:
                    continue
                costs = tuple(own[mode] for own, mode in zip(rows, modes, strict=True))
                found = predict((costs,), arrangement, H100, constants=constants, model_flops=0)
                yield Way(
                    arrangement=arrangement,
                    modes=modes,
                    seconds=found.step_seconds,
                    device_bytes=found.peak_memory.device_bytes,
                )


def fastest_within(size_bytes: int, is_meant: Callable[[Way], bool] = bool) -> float:
    """Return the least seconds of ways that fit; infinite if none does."""
    fitting = (way for way in ways() if way.device_bytes <= size_bytes and is_meant(way))
    return next((way.seconds for way in fitting), float("inf"))


def limits_of(is_best: Callable[[Way], bool]) -> list[int]:
    """Return the memory limits, in bytes, at which such a way is the first to fit, and fastest."""
    found, least = list[int](), float("inf")
    for way in ways():
        if way.device_bytes < least:
            least = way.device_bytes
            found += [way.device_bytes] * is_best(way)
    return found


@pytest.mark.parametrize(
    "is_best",
    [
        lambda way: not way.steps_there and way.modes.count(Recompute.NONE) < 4,
        lambda way: not way.steps_there and way.modes.count(Recompute.FULL_HOST) == 2,
        lambda way: way.steps_there and way.has_full_host,
        lambda way: way.steps_there and way.arrangement.zero.divides_parameters,
        lambda _: True,
    ],
    ids=["recomputed", "full-host", "optimizer and full-host", "parameters on the host", "any"],
)
def test_the_host_is_used_only_where_that_is_faster_or_nothing_else_fits(
    is_best: Callable[[Way], bool],
) -> None:
    limits = limits_of(is_best)
    assert limits, "it is nowhere the fastest"
    for limit in limits:
        plan = planned(GPT2, H100, limits__memory=f"{limit} B", **PLACES)
        seconds = plan.prediction.step_seconds
        assert seconds <= fastest_within(limit) * NEAR
        if Recompute.FULL_HOST in plan.layer_modes:
            assert seconds <= fastest_within(limit, lambda way: not way.has_full_host)
        if plan.arrangement.offload.has_states:
            assert seconds <= fastest_within(limit, lambda way: not way.steps_there)
