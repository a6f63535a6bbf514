"""Says parts of a plan in the words that tables, comments and answers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from autopar.planner.costs.prediction import Arrangement, Recompute, Zero
from autopar.planner.layouts import Kind, Layout
from autopar.planner.plan.plan import Model, Plan, Stage


def nodes_words(plan: Plan) -> str:
    """Return which node rank of torchrun is which kind of machine: "0 is 4 × a, 1 to 2 are …"."""
    told, first = [], 0
    for node, run in groupby(plan.cluster.nodes):
        last = first + len(list(run)) - 1
        which = f"{first} is" if first == last else f"{first} to {last} are"
        links = f" ({node.link.name})" if node.link != node.device.link else ""
        told.append(f"{which} {node.devices} × {node.device.name}{links}")
        first = last + 1
    return ", ".join(told)


def degrees_words(arrangement: Arrangement) -> str:
    """Return the degrees above one: "pp 2 · dp 4 · tp 8"; "one device" where there are none."""
    pairs = (
        ("pp", arrangement.pipeline),
        ("dp", arrangement.data),
        ("tp", arrangement.tensor),
    )
    return " · ".join(f"{name} {degree}" for name, degree in pairs if degree > 1) or "one device"


def sharding_words(arrangement: Arrangement) -> str:
    """Return the ZeRO level, and over how many ranks where these are not all data ranks."""
    if arrangement.zero is Zero.NONE:
        return "no sharding"
    part = "" if arrangement.shard == arrangement.data else f" over {arrangement.shard}"
    return f"ZeRO-{arrangement.zero.value}{part}"


def batch_words(arrangement: Arrangement) -> str:
    """Return the microbatches of a data rank: "8 microbatches of 2 rows"."""
    count, rows = arrangement.microbatches, arrangement.microbatch
    least = f"{min(arrangement.rows)} to " if arrangement.rows else ""
    of = f"of {least}{rows} row{'s' if rows > 1 else ''}"
    return f"{count} microbatches {of}" if count > 1 else f"1 microbatch {of}"


def schedule_words(arrangement: Arrangement) -> str:
    """Return the schedule with its stages per rank; nothing without a pipeline."""
    if arrangement.pipeline == 1:
        return ""
    several = arrangement.stages_per_rank > 1
    return f"{arrangement.schedule}" + (f" × {arrangement.stages_per_rank}" if several else "")


def arrangement_words(arrangement: Arrangement) -> str:
    """Return an arrangement in one line."""
    return ", ".join(part for part in _parts(arrangement) if part)


def other_words(other: Arrangement, chosen: Arrangement) -> str:
    """Return an arrangement by its degrees, and where these are the chosen ones by what differs."""
    if degrees_words(other) != degrees_words(chosen):
        return degrees_words(other)
    degrees, *parts = _parts(other)
    told = [part for part, same in zip(parts, _parts(chosen)[1:], strict=True) if part != same]
    return ", ".join([degrees, *filter(None, told)])


def _parts(arrangement: Arrangement) -> tuple[str, ...]:
    return (
        degrees_words(arrangement),
        sharding_words(arrangement) if arrangement.data > 1 else "",
        schedule_words(arrangement),
        batch_words(arrangement),
        "16-bit gradient sums" if arrangement.compressed_gradients else "",
    )


def recompute_words(stages: Sequence[Stage]) -> str:
    """Return how layers are recomputed: "none", "full", or a mix: "full 20/32"."""
    modes = Counter(mode for stage in stages for mode in stage.recompute)
    total = modes.total()
    mixed = [f"{mode} {n}/{total}" for mode, n in modes.most_common() if mode != Recompute.NONE]
    alone = next(iter(modes), Recompute.NONE)
    return str(alone) if len(modes) <= 1 else ", ".join(mixed)


def layout_words(layout: Layout) -> str:
    """Return a layout as a phrase; the axis of a split should be what people call it."""
    if layout.kind is Kind.SPLIT:
        return f"split along {layout.axis}"
    return _KINDS[layout.kind]


_KINDS = {
    Kind.WHOLE: "whole",
    Kind.REPLICATED: "whole, its gradient partial",
    Kind.PARTIAL: "partial sums",
}


def units_per_second(arrangement: Arrangement, model: Model, step_seconds: float) -> float:
    """Return the tokens (or rows, of a model without a sequence) that a training takes in."""
    return arrangement.global_batch * model.tokens_per_row / step_seconds


def unit_word(model: Model) -> str:
    """Return what a model's throughput is counted in."""
    return "tokens" if model.tokens_per_row > 1 else "samples"
