"""Words for parts of a plan, used by tables, comments and messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.findings.rows import drawn_once, meeting_rows, norm_of_rows, use_of_places
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import Layout, LayoutKind
from autopar.planner.graph.ops import MODEL_DTYPE, Buffer, Op
from autopar.planner.plan.declared.limits import gradients_changed, unread_backward
from autopar.planner.plan.plan import Model, Plan, PlannedStage, StoredPlan
from autopar.planner.precision import Float8, learnt_words
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


def added_up(shares: Sequence[float], *, units: int = 100) -> tuple[int, ...]:
    """Return fractions in units (100: percent) that add up to the rounded total.

    Of the fractions rounded down, those with the largest remainders get one more unit.
    """
    exact = [share * units for share in shares]
    whole = [int(one) for one in exact]
    missing = round(sum(exact)) - sum(whole)
    largest_first = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    more = set(largest_first[:missing])
    return tuple(one + (i in more) for i, one in enumerate(whole))


def nodes_words(plan: StoredPlan) -> str:
    """Return which node rank of torchrun is which machine: "0 is 4 × a, 1 to 2 are …"."""
    nodes, first = [], 0
    for node, run in groupby(plan.cluster.nodes):
        last = first + len(list(run)) - 1
        which = f"{first} is" if first == last else f"{first} to {last} are"
        links = f" ({node.link.name})" if node.link != node.device.link else ""
        nodes.append(f"{which} {node.devices} × {node.device.name}{links}")
        first = last + 1
    return ", ".join(nodes)


def degrees_words(arrangement: Arrangement) -> str:
    """Return the degrees above one: "pp 2 · dp 4 · tp 8"; "one device" if none is."""
    pairs = (
        ("pp", arrangement.pipeline),
        ("dp", arrangement.data),
        ("tp", arrangement.tensor),
    )
    return " · ".join(f"{name} {degree}" for name, degree in pairs if degree > 1) or "one device"


def sharding_words(arrangement: Arrangement) -> str:
    """Return the ZeRO level, and the number of sharing ranks if these are not all data ranks."""
    if arrangement.averaging_ranks == 1 or not arrangement.zero.divides_optimizer:
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
    """Return an arrangement's degrees, or if these are the chosen ones, its differences."""
    if degrees_words(other) != degrees_words(chosen):
        return degrees_words(other)
    degrees, *parts = _parts(other)
    unlike = [part for part, same in zip(parts, _parts(chosen)[1:], strict=True) if part != same]
    return ", ".join([degrees, *filter(None, unlike)])


def _parts(arrangement: Arrangement) -> tuple[str, ...]:
    return (
        degrees_words(arrangement),
        sharding_words(arrangement) if arrangement.data > 1 else "",
        schedule_words(arrangement),
        batch_words(arrangement),
        local_words(arrangement),
        arrangement.compression.words,
        compile_words(arrangement),
        offload_words(arrangement),
    )


def local_words(arrangement: Arrangement) -> str:
    """Return the replicas and their local steps, or nothing."""
    if not arrangement.is_local:
        return ""
    replicas = arrangement.data // arrangement.shard
    parts = f", {arrangement.outer_parts} parts" * (arrangement.outer_parts > 1)
    each = f"{arrangement.sync_every} local steps ({arrangement.outer}{parts})"
    of = f" of {arrangement.ranks // replicas}" if arrangement.ranks > replicas else ""
    return f"{replicas} replicas{of}, {each}"


def zero_meaning(arrangement: Arrangement) -> str:
    """Return what the ZeRO level divides, or that a single device fetches its layers."""
    if arrangement.shards_on_host and arrangement.data == 1:
        return "parameters are in the host's memory, and are fetched layer by layer"
    return arrangement.zero.words


def offload_words(arrangement: Arrangement) -> str:
    """Return what lies on the host, or nothing."""
    parameters = "parameters and " if arrangement.shards_on_host else ""
    return f"{parameters}{arrangement.offload.words}"


def compile_words(arrangement: Arrangement) -> str:
    """Return "compiled layers", with the scales of float8 if used; "" if nothing is compiled."""
    if not arrangement.compile.takes_layers:
        return ""
    scaled = "" if arrangement.float8 is Float8.NONE else f" in float8 ({arrangement.float8})"
    return f"{arrangement.compile.words}{scaled}"


def recompute_words(stages: Sequence[PlannedStage]) -> str:
    """Return the recompute modes: "none", "full", or a mix: "full 20/32"; and a loss in chunks."""
    every = [mode for stage in stages for mode in stage.recompute]
    modes = Counter(mode if mode.spares_device else Recompute.NONE for mode in every)
    total = modes.total()
    mixed = [f"{mode} {n}/{total}" for mode, n in modes.most_common() if mode != Recompute.NONE]
    alone = [str(mode) for mode in modes] or [str(Recompute.NONE)]
    chunks = ["loss in chunks"] if any(mode.makes_chunks for mode in every) else []
    return ", ".join([*(alone if len(modes) <= 1 else mixed), *chunks])


def layout_words(layout: Layout) -> str:
    """Return a layout as a phrase; a split layout must have the axis's name, not its number."""
    if layout.kind is LayoutKind.SPLIT:
        return f"split along {layout.axis}"
    return _KINDS[layout.kind]


_KINDS = {
    LayoutKind.WHOLE: "whole",
    LayoutKind.REPLICATED: "whole, its gradient partial",
    LayoutKind.PARTIAL: "partial sums",
}


def units_per_second(arrangement: Arrangement, model: Model, step_seconds: float) -> float:
    """Return the tokens per second, or rows per second for a model without sequences."""
    return arrangement.global_batch * model.tokens_per_row / step_seconds


def unit_word(model: Model) -> str:
    """Return the unit of a model's throughput."""
    return "tokens" if model.tokens_per_row > 1 else "samples"


def meaning_notes(plan: Plan) -> tuple[str, ...]:
    """Return notes about a plan's effect on the training, a few sentences each."""
    notes = (
        parts_apart(plan),
        replicas_apart(plan),
        sums_apart(plan),
        statistics_apart(plan),
        draws_apart(plan),
        narrowed_buffers_note(plan),
        gradients_changed(plan.graph, plan.arrangement),
        unread_backward(plan.graph, plan.arrangement),
        evaluates_parts(plan),
        shares_nothing(plan),
    )
    return tuple(note for note in notes if note)


def parts_apart(plan: Plan) -> str:
    """Return why splitting the batch as planned changes the loss, or ""."""
    arranged, graph = plan.arrangement, plan.graph
    if arranged.data * arranged.microbatches == 1:
        return ""
    if (met := meeting_rows(graph)) is not None:
        return (
            f"{rows_meet(met, graph)}: each microbatch of each data rank compares its own rows "
            "only, so this is not the training of one device."
        )
    if (nearly := nearly_a_mean(graph)) is not None:
        return (
            f"{is_nearly(nearly)}: each part of the batch takes its own, so this is nearly, but "
            "not quite, the training of one device."
        )
    return ""


def replicas_apart(plan: Plan) -> str:
    """Return how local steps change the training, or ""."""
    arranged = plan.arrangement
    if not arranged.is_local:
        return ""
    return (
        f"{arranged.data // arranged.shard} replicas take {arranged.sync_every} local steps before "
        f"an outer optimizer averages them, as was allowed, so this is not the training of one "
        f"device. {_turns(plan)}{learnt_words(arranged.outer)}"
    )


def _turns(plan: Plan) -> str:
    """Return a sentence on outer steps of parts of the model, or ""."""
    if not (delay := plan.prediction.outer_delay):
        return ""
    arranged, steps = plan.arrangement, f"{delay} local step{'s' * (delay > 1)}"
    return f"{arranged.outer_parts} parts have outer steps in turn, each sent during {steps}. "


def sums_apart(plan: Plan) -> str:
    """Return how lossy compression of gradients changes the training, or ""."""
    if not (own := plan.arrangement.compression).keeps_lost:
        return ""
    why = f"data ranks sum gradients {own.sums}, as was allowed, so this is not quite the training"
    return f"{why} of one device. {learnt_words(own)}"


def statistics_apart(plan: Plan) -> str:
    """Return the effect of several microbatches on batch norms, or ""."""
    norm, count = norm_of_rows(plan.graph), plan.arrangement.microbatches
    if norm is None or count == 1:
        return ""
    return (
        f"{named(norm)} takes the statistics of each of {count} microbatches separately, as was "
        "asked for, so this is not the training of one device."
    )


def draws_apart(plan: Plan) -> str:
    """Return which random numbers each part of a batch draws separately, or ""."""
    arranged = plan.arrangement
    drawn = drawn_once(plan.graph) if arranged.data * arranged.microbatches > 1 else None
    if drawn is None:
        return ""
    return (
        f"{named(drawn)} draws numbers for all rows together. One device draws them once in a "
        "step; here each microbatch of each data rank draws its own."
    )


def narrowed_buffers(plan: Plan) -> tuple[Buffer, ...]:
    """Return the buffers that a 16-bit plan casts to 16 bits, although they are fp32."""
    if not plan.arrangement.precision.is_half:
        return ()
    return tuple(one for one in plan.graph.buffers if one.narrowed and one.dtype == MODEL_DTYPE)


def narrowed_buffers_note(plan: Plan) -> str:
    """Return which fp32 buffers the plan stores in 16 bits, and what that changes, or ""."""
    found, precision = narrowed_buffers(plan), plan.arrangement.precision
    if not found:
        return ""
    names, written = (
        " and ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", one.name) for one in some))
        for some in (found, [one for one in found if one.updated])
    )
    lost = f" The forward writes to {written}, where small changes are lost." if written else ""
    return (
        f"the model combines {names} (fp32) with activations in {precision}. The result would be "
        f"fp32, which torch does not multiply by weights in {precision}, so the plan holds "
        f"{names} in {precision}, as model.to(torch.{precision.torch_name}) does.{lost} A buffer "
        "stays in fp32 if the model casts it where it reads it: x + self.table.to(x.dtype)."
    )


def evaluates_parts(plan: Plan) -> str:
    """Return a note on trainable parts that the constructor left in eval mode, or ""."""
    parts = plan.graph.in_eval_mode
    if not parts:
        return ""
    are = "is in eval mode, though it learns" if len(parts) == 1 else "are in eval mode, yet learn"
    return (
        f"{', '.join(parts)} {are}: dropout is off there, and batch norms keep their statistics, "
        "as in a loop that never calls model.train(). To train in training mode, return "
        "model.train() from build_model."
    )


def shares_nothing(plan: StoredPlan) -> str:
    """Return a note if all tensor ranks compute the same, or ""."""
    splits = any(layout.axis for layouts in plan.layouts for layout in layouts)
    if plan.arrangement.tensor == 1 or splits:
        return ""
    return (
        f"tp is pinned to {plan.arrangement.tensor}, but any split would take longer, so each "
        "tensor rank computes all that the others do. Use fewer devices, pin dp, or require a "
        "split ([[splits]] in a constraints file)."
    )


def rows_meet(met: Op, graph: Graph) -> str:
    """Say that an op mixes the rows of a batch, or computes with their places in the batch."""
    return f"the rows of a batch meet in {named(met)}{use_of_places(met, graph)}"


def nearly_a_mean(graph: Graph) -> Op | None:
    """Return the op that keeps the loss of a batch from being exactly the mean of its parts'."""
    loss = loss_of_parts(graph)
    return loss.op if loss.follows is Follows.NEARLY else None


def is_nearly(op: Op) -> str:
    """Say that with this op the loss is not exactly a mean over rows."""
    if kind_of(op) is OpKind.MULTIPLICATION:
        return (
            f"{named(op)} multiplies two means over rows, as balancing losses of experts do "
            "(Megatron has one for each microbatch)"
        )
    return f"{named(op)} makes the loss a mean over rows only nearly"


def named(op: Op) -> str:
    """Return an op's name and its line in the model's code, without the folder.

    An op that is only in library code is located by the module that was called.
    """
    place = op.location.rpartition("/")[2] or op.call
    return f"{op.name} ({place})" if place else op.name


CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWDefaults:
    """AdamW's default settings if the model file has no optimizer, as usual for language models.

    Scripts have the same settings in capitals.
    """

    learning_rate: float = 3e-4  # the highest
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # of matrices only
    warmup_steps: int = 2000  # a tenth of all steps at most
    final_share: float = 0.1  # of the highest rate, in the last step


ADAMW = AdamWDefaults()


def is_scheduled_here(plan: StoredPlan) -> bool:
    """Whether the script has autopar's schedule: only without an optimizer in the model file."""
    return not plan.model.has_optimizer and not plan.model.has_scheduler


def chosen(plan: StoredPlan) -> Iterator[str]:
    """Yield each choice that the plan makes for the user, and where to make another."""
    is_declared = any(one.field == "global_batch" for one in plan.constraints)
    if not is_declared and plan.model.batch.fixed is None:
        rows, of_each = plan.arrangement.global_batch, plan.model.tokens_per_row
        tokens = f", {rows * of_each:,} tokens" if of_each > 1 else ""
        yield f"{rows:,} rows a step{tokens} (--global-batch)"
    if not plan.model.has_optimizer:
        yield (
            f"AdamW, learning rate {ADAMW.learning_rate:g}, betas {ADAMW.betas}, weight "
            f"decay {ADAMW.weight_decay:g} on matrices only (no build_optimizer in the model file)"
        )
    if is_scheduled_here(plan):
        yield (
            f"linear warm-up over {ADAMW.warmup_steps:,} steps, at most a tenth of all, then a "
            f"cosine down to {ADAMW.final_share:g} of that rate (no build_scheduler)"
        )
    yield f"gradients clipped to norm {CLIP_NORM:g} (CLIP_NORM)"
    if not plan.model.has_dataset:
        yield "one random batch, which the model learns by heart (build_dataset)"
