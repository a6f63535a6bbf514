"""Says why no plan fits: what the smallest one needs, what is there, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.errors import InfeasibleError, TimeLimitError
from autopar.planner.plan.declared.conflict import conflict_text
from autopar.planner.plan.declared.constraints import Declared, constraints_of
from autopar.planner.plan.telling.words import arrangement_words


def too_late(waiting: int) -> TimeLimitError:
    """Return the error of a search that found nothing in its time."""
    return TimeLimitError(
        "the time limit came before any plan was found",
        expected=f"{waiting} arrangements were still open",
        fix="allow more time with --time-limit, or pin degrees with --pin",
    )


def nothing_runs(
    conflict: Sequence[Declared], *, devices: int, layers: int, shared: Sequence[str] = ()
) -> InfeasibleError:
    """Return the error of a space without any arrangement, whatever the memory.

    Where constraints are the cause, `conflict` holds some that cannot be had together. `shared`
    are buffers of several layers, which these write.
    """
    if not conflict:
        return InfeasibleError(
            f"no arrangement of {devices} devices can run the model",
            fix="use another number of devices",
        )
    return InfeasibleError(
        f"on {devices} devices no plan satisfies {conflict_text(conflict)}",
        expected=_expected(conflict, layers=layers, shared=shared),
        fix="leave one of them out, or change it"
        if len(conflict) > 1
        else "leave it out, or change it",
    )


def _expected(conflict: Sequence[Declared], *, layers: int, shared: Sequence[str]) -> str:
    chosen = constraints_of(conflict)
    splits = all(SCHEDULES[kind].splits_backward for kind in chosen.schedules)
    if splits and min(chosen.zero_levels) >= Zero.GRADIENTS:
        return (
            "zero=0 or zero=1 with zero bubble: backwards in halves keep parameters and gradients "
            "whole until the last microbatch"
        )
    if _is_about_stages(conflict) or shared:
        return (
            f"stages of whole layers in the model's order, each with some of its {layers} layers "
            f"that learn{_beside(shared)}"
        )
    return ""


def _beside(shared: Sequence[str]) -> str:
    name = next(iter(shared), "")
    return f"; all layers that use the buffer {name}, which they write, in one" if name else ""


def _is_about_stages(conflict: Sequence[Declared]) -> bool:
    fields = {one.field for one in conflict}
    leaves_the_rest = {"data", "tensor"} <= fields  # of the devices to the pipeline
    return leaves_the_rest or not fields.isdisjoint(("pipeline", "stages_per_rank", "stages"))


def too_large(
    least: Arrangement, *, needed_bytes: int, limit_bytes: int, cluster: Cluster
) -> InfeasibleError:
    """Return the error of a memory limit that the smallest plan exceeds, to the byte."""
    return InfeasibleError(
        f"no plan fits: every one needs {_exact(needed_bytes)} or more on a device, and "
        f"{_exact(limit_bytes)} may be used: {_exact(needed_bytes - limit_bytes)} short",
        where=f"the least is with {arrangement_words(least)}",
        fix=_nearest_change(needed_bytes, cluster),
    )


def _exact(size_bytes: int) -> str:
    """Return bytes as people read them, and the number itself where that rounds."""
    if size_bytes < 2**20:
        return f"{size_bytes:,} B"
    return f"{bytes_text(size_bytes)} ({size_bytes:,} B)"


def _nearest_change(needed_bytes: int, cluster: Cluster) -> str:
    memory = min(node.device.memory_bytes for node in cluster.nodes)
    if needed_bytes <= memory:
        return f'allow more of the device: --memory "{needed_bytes} B"'
    return "take more devices, devices with more memory, or a smaller global batch"
