"""Reads framework.toml: what training frameworks and drivers add to a step and to memory."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autopar.planner.cluster.reading import figure, number
from autopar.planner.cluster.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What the frameworks of published runs cost their host for each layer."""

    op_seconds: float
    collective_seconds: float
    checkpoint_forward_seconds: float
    checkpoint_backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """Everything that framework.toml holds; it says what each one means."""

    step_seconds: float
    action_seconds: float
    overlap_slowdown: float
    optimizer_passes: float
    context_bytes: int
    communicator_bytes: int
    margin: float
    host: HostWork


@cache
def read_framework_constants() -> FrameworkConstants:
    """Return the constants that are shipped with autopar."""
    source = resources.files("autopar.planner.costs").joinpath("framework.toml")
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    step, memory = table["step"], table["memory"]
    return FrameworkConstants(
        step_seconds=figure(step, "step_seconds", parse_seconds, where="step"),
        action_seconds=figure(step, "action_seconds", parse_seconds, where="step"),
        overlap_slowdown=number(step, "overlap_slowdown", where="step"),
        optimizer_passes=number(step, "optimizer_passes", where="step"),
        context_bytes=figure(memory, "context", parse_bytes, where="memory"),
        communicator_bytes=figure(memory, "communicator", parse_bytes, where="memory"),
        margin=number(memory, "margin", where="memory"),
        host=HostWork(
            **{
                f"{name}_seconds": figure(table["host"], name, parse_seconds, where="host")
                for name in ("op", "collective", "checkpoint_forward", "checkpoint_backward")
            }
        ),
    )
