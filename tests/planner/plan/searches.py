"""A factory of real plans: the whole search on a model of the zoo."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import parse_cluster
from autopar.planner.plan.declared.constraints import Constraints, Declared, constraints_of
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.search import search
from tests.planner.plan.plans import model as model_facts
from tests.planner.plan.plans import parts_of

TINY_GPT2 = ("gpt2.py",)


def declared(*rules: Declared, **places: object) -> Constraints:
    """Constraints by their places in a file, with two underscores for the dot, and rules."""
    settings = (
        declare(place.replace("__", "."), value, origin="test", where=place)
        for place, value in places.items()
    )
    return constraints_of((*settings, *rules))


def planned(
    model: tuple[str, ...],
    cluster: Cluster,
    *rules: Declared,
    time_limit_seconds: float | None = None,
    **places: Any,
) -> Plan:
    """Search the fastest plan of a zoo model (its file, then arguments) on a cluster."""
    graph, axes, layers = parts_of(*model)
    constraints = declared(*rules, **places)
    if "tolerance" not in places:
        constraints = replace(constraints, tolerance=0.0)
    return search(
        graph,
        axes,
        layers,
        model_facts(graph, model[0]),
        cluster,
        constraints,
        time_limit_seconds=time_limit_seconds,
    )


def two_nodes(network: str, *, devices: int = 4, device: str = "a100-80gb-sxm") -> Cluster:
    """Two nodes of so many devices, joined by a known network."""
    text = (
        f'[[nodes]]\ncount = 2\ndevice = "{device}"\ndevices = {devices}\n'
        f'[network]\nlike = "{network}"\n'
    )
    return parse_cluster(text, where="test")


def term(plan: Plan, name: str) -> float:
    """Return the seconds of one term of a plan's step."""
    return sum(one.seconds for one in plan.prediction.terms if one.name == name)


def terms(plan: Plan, names: Iterable[str]) -> float:
    """Return the seconds of several terms of a plan's step."""
    return sum(term(plan, name) for name in names)
