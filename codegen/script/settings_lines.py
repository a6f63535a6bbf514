"""Turns a plan into the settings at the top of its script, and into its docstring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from textwrap import wrap

from autopar.codegen.script import ScriptSetting
from autopar.codegen.text.values import WIDTH, Source, identifier, literal, prose
from autopar.planner.cluster.cluster import Backend
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.layers.chunked_loss import LOSS_CHUNKS
from autopar.planner.costs.ops.measurements import Provenance
from autopar.planner.costs.prediction import Arrangement, CommunicationTerm
from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.graph.graph import Graph
from autopar.planner.plan.plan import Model, Plan, RunnerUp
from autopar.planner.plan.search.space import DEFAULT_BUCKET_BYTES
from autopar.planner.plan.telling.explanation import (
    MEMORY_CATEGORIES,
    host_words,
    part_words,
    shares_of,
)
from autopar.planner.plan.telling.words import (
    ADAMW,
    CLIP_NORM,
    arrangement_words,
    chosen,
    is_scheduled_here,
    meaning_notes,
    nodes_words,
    other_words,
    recompute_words,
    unit_word,
    units_per_second,
    zero_meaning,
)
from autopar.planner.precision import Compression
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of
from autopar.runtime.ranks.user_code import CPU_BY_FORMULA

_FEW = 8  # at most so many data ranks have their rows listed one by one


def settings_of(plan: Plan) -> Iterator[ScriptSetting]:
    """Yield settings that can be changed without planning again."""
    yield ScriptSetting("STEPS", literal(100), "--steps")
    if not plan.model.has_optimizer:
        yield ScriptSetting("LEARNING_RATE", literal(ADAMW.learning_rate), "of AdamW; --lr")
        yield ScriptSetting("BETAS", literal(ADAMW.betas), "of AdamW; --betas")
        decayed = "of AdamW, on matrices: norms and biases have none; --weight-decay"
        yield ScriptSetting("WEIGHT_DECAY", literal(ADAMW.weight_decay), decayed)
    if is_scheduled_here(plan):
        warmed = "steps in which the rate rises; at most a tenth of --steps; --warmup-steps"
        yield ScriptSetting("WARMUP_STEPS", literal(ADAMW.warmup_steps), warmed)
        final = "the cosine ends at this share of LEARNING_RATE"
        yield ScriptSetting("FINAL_SHARE", literal(ADAMW.final_share), final)
    clipped = "largest norm of all gradients together; 0: no clipping; --clip"
    yield ScriptSetting("CLIP_NORM", literal(CLIP_NORM), clipped)
    yield ScriptSetting("SEED", literal(0), "of weights, order of the data and dropout; --seed")
    precision = plan.arrangement.precision
    words = (
        "of weights and activations; gradients and optimizer are fp32"
        if precision.is_half
        else "of weights, activations and gradients"
    )
    yield ScriptSetting("DTYPE", literal(precision.torch_name), f"{words}; --dtype")
    if precision.scales_loss:
        yield ScriptSetting(
            "LOSS_SCALE", literal(2.0**15), "the first scale; halved when a gradient overflows"
        )
        yield ScriptSetting(
            "CALM_STEPS", literal(2000), "steps without overflow until LOSS_SCALE doubles"
        )
    kept = "file or folder of the trained weights, or none; --export"
    yield ScriptSetting("EXPORT", literal("model.safetensors"), kept)
    folder = "folder of checkpoints, or none; --checkpoint"
    yield ScriptSetting("CHECKPOINT", literal("none"), folder)
    every = _in_rounds(1000, plan.arrangement)
    yield ScriptSetting("CHECKPOINT_EVERY", every, "steps; --checkpoint-every")
    yield ScriptSetting("KEEP", literal(3), "how many of the newest checkpoints stay; --keep")
    checked = "compare the first loss with plain PyTorch's; --check-first-step"
    yield ScriptSetting("CHECK_FIRST_STEP", literal(whole_model_fits(plan)), checked)
    yield ScriptSetting("LOG_EVERY", literal(10), "steps; --log-every")
    if plan.model.has_dataset:
        ahead = "processes per rank that read ahead; auto: 2 for a GPU, 0 on CPUs; --workers"
        yield ScriptSetting("WORKERS", literal("auto"), ahead)
    if synchronises_batch_norms(plan):
        over = "a replica's data ranks" if plan.arrangement.is_local else "all data ranks"
        meaning = f"statistics over {over}, as on one device; False: over each alone"
        yield ScriptSetting("SYNC_BATCH_NORM", literal(True), meaning)


def whole_model_fits(plan: Plan) -> bool:
    """Whether the fullest device has room for all parameters beside a step's memory."""
    rank, memory = plan.fullest
    left_bytes = plan.limit_bytes(rank) - memory.device_bytes
    return plan.arrangement.precision.item_bytes * plan.model.parameters <= left_bytes


def evaluating(plan: Plan) -> Iterator[ScriptSetting]:
    """Yield settings of evaluations."""
    every = _in_rounds(1000, plan.arrangement)
    yield ScriptSetting("EVAL_EVERY", every, "steps between evaluations; 0: none; --eval-every")


def _in_rounds(steps: int, arranged: Arrangement) -> Source:
    """Return a number of steps as Python, rounded up to a multiple of the local steps."""
    return literal(steps + -steps % arranged.sync_every)


def sums_rows(plan: Plan) -> bool:
    """Whether a step divides its batch into parts whose losses add up to the batch's loss."""
    is_whole = plan.arrangement.data * plan.arrangement.microbatches == 1
    return not is_whole and loss_of_parts(plan.graph).follows is Follows.SUM


def synchronises_batch_norms(plan: Plan) -> bool:
    """Whether the model has batch norms, and several data ranks share their statistics."""
    return plan.arrangement.averaging_ranks > 1 and has_batch_norm(plan.graph)


def has_batch_norm(graph: Graph) -> bool:
    """Whether some op normalises over the batch."""
    return any(kind_of(op) is OpKind.BATCH_NORM for op in graph.ops)


def planned(plan: Plan) -> Iterator[ScriptSetting]:
    """Yield the arrangement, which determines the predicted memory and time."""
    arranged = plan.arrangement
    yield from _degrees(arranged)
    if arranged.rows:
        rows = "rows of a microbatch on each data rank"
        yield ScriptSetting("MICROBATCH", _each(arranged.rows), rows)
    else:
        on = " on each data rank" if arranged.data > 1 else ""
        yield ScriptSetting("MICROBATCH", literal(arranged.microbatch), f"rows of a microbatch{on}")
    count = "per step; gradients are accumulated over them"
    yield ScriptSetting("MICROBATCHES", literal(arranged.microbatches), count)
    if arranged.data > 1 or arranged.shards_on_host:
        yield from _data_parallel(arranged)
    if has_own_buckets(arranged):
        bucket = "gradients are sent in buckets of this size, during the backward"
        yield ScriptSetting("BUCKET_BYTES", _in_mebibytes(arranged.bucket_bytes), bucket)
    if arranged.offload.has_states:
        fetched = "parameters, " if arranged.shards_on_host else ""
        yield ScriptSetting("OFFLOAD", literal(True), f"{fetched}{arranged.offload.meaning}")
    if arranged.pipeline > 1:
        schedule = "the order of forwards and backwards"
        yield ScriptSetting("SCHEDULE", literal(str(arranged.schedule)), schedule)
        if arranged.stages_per_rank > 1:
            per_rank = "stages on each rank; the layers of a stage are consecutive"
            yield ScriptSetting("STAGES_PER_RANK", literal(arranged.stages_per_rank), per_rank)
    yield from _units(plan.model, arranged)
    if any(mode.makes_chunks for mode in plan.layer_modes):
        chunks = "chunks of rows in the loss, so that the logits of only one are in memory"
        yield ScriptSetting("LOSS_CHUNKS", literal(LOSS_CHUNKS), chunks)
    yield ScriptSetting("PREDICTED", literal(_predicted(plan)), "device, seconds per step, MFU")


def _degrees(arranged: Arrangement) -> Iterator[ScriptSetting]:
    """Yield the axes with several ranks."""
    meanings = {
        "pipeline": "pipeline-parallel ranks: each has some of the layers",
        "data": "data-parallel ranks: each has its own rows of a batch",
        "tensor": "tensor-parallel ranks: each has a shard of the tensors that are split",
    }
    for axis, meaning in meanings.items():
        if (degree := getattr(arranged, axis)) > 1:
            yield ScriptSetting(axis.upper(), literal(degree), meaning)


def _predicted(plan: Plan) -> tuple[str, float, float]:
    """Return the predicted figures, rounded to their accuracy.

    The device of CPU plans is "cpu", whatever a cluster file calls it.
    """
    device = plan.machines.device
    if Backend(plan.machines.backend).is_on_cpu:
        is_measured = any(one.provenance is not Provenance.FORMULA for one in plan.prediction.terms)
        device = "cpu" if is_measured else CPU_BY_FORMULA
    figures = plan.prediction.step_seconds, plan.prediction.mfu
    step_seconds, mfu = (float(f"{figure:.4g}") for figure in figures)
    return device, step_seconds, mfu


def _each(rows: tuple[int, ...]) -> Source:
    """Return the rows of each data rank; many ranks are written as runs of equal numbers."""
    if len(rows) <= _FEW:
        return literal(rows)
    runs = ((own, len(list(run))) for own, run in groupby(rows))
    return Source(" + ".join(f"({literal(own)},) * {literal(count)}" for own, count in runs))


def _data_parallel(arranged: Arrangement) -> Iterator[ScriptSetting]:
    """Yield settings of data parallelism; except ZERO, only those that differ from the default."""
    yield ScriptSetting("ZERO", literal(arranged.zero.value), zero_meaning(arranged))
    if arranged.is_local:
        of = "data ranks of a replica, which average gradients in every step"
        yield ScriptSetting("SHARD", literal(arranged.shard), of)
        every = "local steps of each replica between outer steps, which average the replicas"
        yield ScriptSetting("SYNC_EVERY", literal(arranged.sync_every), every)
    elif has_copies(arranged):
        shared = "data ranks that share one copy of what ZERO divides"
        yield ScriptSetting("SHARD", literal(arranged.shard), shared)
    if (own := arranged.compression) is not Compression.NONE:
        kept = "; what is lost is added to the next ones" if own.keeps_lost else ""
        yield ScriptSetting("COMPRESS", literal(own.value), f"gradients are sent {own.sums}{kept}")


def has_copies(arranged: Arrangement) -> bool:
    """Whether there are several copies of what ZeRO shards, or several replicas."""
    divides = arranged.zero.divides_optimizer or arranged.is_local
    return divides and arranged.shard < arranged.data


def has_own_buckets(arranged: Arrangement) -> bool:
    """Whether gradients are sent in buckets of another size than DDP's."""
    return arranged.has_buckets and arranged.bucket_bytes != DEFAULT_BUCKET_BYTES


def _in_mebibytes(size_bytes: int) -> Source:
    mebibytes, rest = divmod(size_bytes, 2**20)
    return literal(size_bytes) if rest or not mebibytes else Source(f"{mebibytes} * 2**20")


def _units(model: Model, arranged: Arrangement) -> Iterator[ScriptSetting]:
    rows = "sum(MICROBATCH) * MICROBATCHES" if arranged.rows else f"MICROBATCH * {parts(arranged)}"
    yield ScriptSetting("GLOBAL_BATCH", Source(rows), f"{arranged.global_batch:,} rows per step")
    if model.tokens_per_row > 1:
        per_row = Source(f"GLOBAL_BATCH * {literal(model.tokens_per_row)}")
        said = f"{model.tokens_per_row:,} {unit_word(model)} per row"
        yield ScriptSetting(units_per_step(model), per_row, said)


def parts(arranged: Arrangement) -> str:
    """Return how many microbatches of all data ranks a step has, as Python."""
    return "MICROBATCHES * DATA" if arranged.data > 1 else "MICROBATCHES"


def units_per_step(model: Model) -> Source:
    """Return the name of the constant with the samples or tokens of a step."""
    many = f"{unit_word(model).upper()}_PER_STEP"
    return identifier(many if model.tokens_per_row > 1 else "GLOBAL_BATCH")


_LEAST_SHARE = 0.01  # of a step or a device: smaller parts are added up


def docstring(plan: Plan, file_name: str, *notes: str) -> Source:
    """Return the docstring of a script, with notes in addition to the plan's."""
    paragraphs = (
        _title(plan),
        *([*_wrapped(f"Note: {note}")] for note in (*meaning_notes(plan), *notes)),
        _how_to_run(plan, file_name),
        _chosen(plan),
        _predicted_words(plan),
        _why(plan),
    )
    lines = [line for paragraph in paragraphs for line in [*paragraph, ""]]
    text = "\n".join(prose(line) for line in lines[:-1])
    return Source(f'"""{text}\n"""')


def _title(plan: Plan) -> Iterator[str]:
    machines = plan.machines
    devices = f"{machines.devices} devices" if machines.devices > 1 else "one device"
    yield from _wrapped(f"Train {plan.model.name} on {devices}.", width=WIDTH - 3)
    yield ""
    again = f", recompute {recompute_words(plan.stages)}".replace(", recompute none", "")
    yield from _wrapped(f"The plan: {arrangement_words(plan.arrangement)}{again}.")


def _how_to_run(plan: Plan, file_name: str) -> Iterator[str]:
    ranks, nodes = plan.arrangement.ranks, plan.machines.nodes
    if nodes == 1:
        yield "Run it on one node (its options: --help):"
        yield f"    torchrun --nproc-per-node {ranks} {file_name}"
    nodes = max(nodes, 2)
    if ranks % nodes == 0:
        on = "Or on" if plan.machines.nodes == 1 else "Run it on each of"
        yield f"{on} {nodes} nodes; HOST is the first one's address, NODE 0 to {nodes - 1}:"
        places = f"--nnodes {nodes} --nproc-per-node {ranks // nodes} --node-rank NODE"
        yield f"    torchrun {places} --master-addr HOST {file_name}"
    elif plan.machines.nodes > 1:
        yield f"Run it on each of {nodes} nodes, NODE from 0 as listed below; HOST is the first"
        yield f"one's address, DEVICES how many a node has, {ranks} on all together:"
        places = f"--nnodes {nodes} --nproc-per-node DEVICES --node-rank NODE"
        yield f"    torchrun {places} --master-addr HOST {file_name}"
    if not plan.cluster.has_equal_nodes:
        yield from _wrapped(f"Nodes are unlike, and NODE says which is which: {nodes_words(plan)}.")


def _chosen(plan: Plan) -> Iterator[str]:
    yield from _wrapped(f"Defaults: {'; '.join(chosen(plan))}.")


def _predicted_words(plan: Plan) -> Iterator[str]:
    found, machines = plan.prediction, plan.machines
    rate = units_per_second(plan.arrangement, plan.model, found.step_seconds)
    yield from _wrapped(
        f"Predicted on {machines.devices} × {machines.device}: {seconds_text(found.step_seconds)} "
        f"per step, {rate:,.0f} {unit_word(plan.model)}/s, {found.mfu:.1%} of the peak FLOPs"
    )
    terms = ((term.name, term.seconds) for term in found.terms)
    yield from _shares(terms, found.step_seconds, seconds_text)
    shown = [one for one in found.communication if one.seconds > 0]
    if shown:
        yield "Communication of the busiest rank in a step:"
    for one in shown:
        times = f"{one.count:,} × {one.collective} " if one.count else ""
        size = f"{bytes_text(one.payload_bytes)}, " if one.payload_bytes else ""
        took = f"{size}{seconds_text(one.seconds)}, {_exposed(one)}"
        over = f"over {one.ranks} ranks, " if one.ranks > 1 else ""
        yield from _wrapped(f"{one.reason}: {times}{over}{took}", indent=4)
    rank, memory = plan.fullest
    limit = plan.limit_bytes(rank)
    taken = f"{bytes_text(memory.device_bytes)} of {bytes_text(limit)}"
    yield f"Memory of the fullest device: {taken} ({memory.device_bytes / limit:.0%})"
    sizes = ((name, getattr(memory, field)) for name, field in MEMORY_CATEGORIES)
    yield from _shares(sizes, memory.device_bytes, bytes_text)
    yield from (line for told in host_words(plan) for line in _wrapped(f"Beside it {told}."))


def _exposed(term: CommunicationTerm) -> str:
    """Return in words how much of a communication's time lengthens the step."""
    if not term.exposed_seconds:
        return "none of it exposed"
    if term.exposed_seconds >= term.seconds:
        return "all of it exposed"
    return f"{seconds_text(term.exposed_seconds)} of it exposed"


def _shares(
    parts: Iterable[tuple[str, float]], whole: float, text: Callable[[float], str]
) -> Iterator[str]:
    """Yield lines with the parts of a whole; the smallest parts are added up to "the rest"."""
    sizes, rest = {}, 0.0
    for name, part in parts:
        if part >= _LEAST_SHARE * whole:
            sizes[name] = part
        else:
            rest += part
    if rest:
        sizes["the rest"] = rest
    words = [f"{name} {text(part)}" for name, part in sizes.items()]
    yield from _wrapped(", ".join(words), indent=4)


def _why(plan: Plan) -> Iterator[str]:
    found, fastest = plan.prediction, plan.fastest
    slower = "" if fastest is None else f"{_simpler(plan, fastest)}; "
    takes = part_words(found, max(shares_of(found), key=lambda share: share.seconds).part)
    why = f"{slower}{_certainty(plan)}. {takes[0].upper()}{takes[1:]}."
    yield from _wrapped(f"Why this plan: {why}")
    of = "" if fastest is None else " of another kind"
    for other in plan.runners_up[:1]:
        longer = other.step_seconds / found.step_seconds - 1
        yield from _wrapped(
            f"The next best{of}, {other_words(other.arrangement, plan.arrangement)}, takes "
            f"{seconds_text(other.step_seconds)} ({longer:+.1%}): {other.difference}."
        )


def _simpler(plan: Plan, fastest: RunnerUp) -> str:
    """Return how a plan compares with the fastest one, which is less simple."""
    took, by = seconds_text(fastest.step_seconds), f"its step {plan.slower_by:.2%} longer"
    if fastest.arrangement == plan.arrangement:
        return f"its layouts are simpler than the fastest plan's ({took}), and {by}"
    other = other_words(fastest.arrangement, plan.arrangement)
    return f"it is simpler than the fastest ({other}: {took}), and {by}"


def _certainty(plan: Plan) -> str:
    """Return in words what is proved about the plan or, if it is a simpler one, the fastest one."""
    count, gap = plan.proof.enumerated, plan.proof.gap
    of_pinned = "no plan for the pinned arrangement"
    none = f"none of the {count:,} arrangements" if count > 1 else of_pinned
    than = f" than {seconds_text(plan.fastest.step_seconds)}" if plan.fastest is not None else ""
    return f"{none} is over {gap:.2%} faster{than}" if gap > 0 else f"{none} is faster{than}"


def _wrapped(text: str, *, indent: int = 0, width: int = WIDTH) -> list[str]:
    margin, rest = " " * indent, " " * (indent and indent + 2)
    tied = _FIGURE.sub("\\1\N{NO-BREAK SPACE}\\2", text)  # a figure and its unit stay on one line
    lines = wrap(tied, width, initial_indent=margin, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


_FIGURE = re.compile(r"(\d) ([num]?s|[KMGTP]?i?B)\b")
