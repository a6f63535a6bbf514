"""Says why no plan fits: what the smallest one needs, what is there, and what would help."""

from __future__ import annotations

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.errors import InfeasibleError, TimeLimitError
from autopar.planner.plan.words import arrangement_words


def too_late(waiting: int) -> TimeLimitError:
    """Return the error of a search that found nothing in its time."""
    return TimeLimitError(
        "the time limit came before any plan was found",
        expected=f"{waiting} arrangements were still open",
        fix="allow more time with --time-limit, or pin degrees with --pin",
    )


def nothing_runs() -> InfeasibleError:
    """Return the error of a space without any arrangement, whatever the memory."""
    return InfeasibleError(
        "no arrangement of these devices can run the model under the constraints",
        fix="loosen the pins and rules, or use another number of devices",
    )


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
