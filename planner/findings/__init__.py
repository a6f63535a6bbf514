"""Finds properties of a model that restrict plans: mixed rows, means, writes, optimizers.

This file has the properties of an optimizer and its schedule, as data that needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum, auto
from typing import NamedTuple

from autopar.planner.graph.graph import Graph


class ScheduleEnd(NamedTuple):
    """The step in which a schedule raises an error, the error's message, and where it is raised."""

    step: int
    said: str
    where: str


class Reach(IntEnum):
    """What the update of an element depends on, beside the element's own gradients."""

    NUMBER = 0  # nothing else
    PARAMETER = 1  # other elements of its parameter
    MODEL = 2  # other parameters


class ParameterPart(StrEnum):
    """The part of a parameter that a rank's optimizer steps, where plans divide parameters."""

    SHARD = auto()  # of tensor ranks: the optimizer is made for these, too
    ROWS = auto()  # of ZeRO-2 and 3
    FLAT = auto()  # of ZeRO-1, and of an optimizer in the host's memory: a slice without dims


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """Properties of an optimizer, found by trying it."""

    name: str
    reach: Reach
    groups_by_position: bool  # groups depend on positions in the list of parameters
    groups_by_size: bool = False  # groups depend on sizes of parameters
    unlike_parts: tuple[ParameterPart, ...] = ()  # parts with other updates than in the whole
    moments: tuple[float, ...]  # of each trainable parameter: see Parameter.moments
    draws: bool = False  # its step draws random numbers
    own_tensors: tuple[str, ...] = ()  # see `own_tensors` in optimizer_call.py
    ends: ScheduleEnd | None = None  # where its schedule fails


def with_moments(graph: Graph, traits: OptimizerTraits | None) -> Graph:
    """Return the graph with the number of the optimizer's states for each parameter."""
    if traits is None:
        return graph
    moments = iter(traits.moments)
    parameters = tuple(
        replace(one, moments=next(moments)) if one.trainable else one for one in graph.parameters
    )
    return replace(graph, parameters=parameters)
