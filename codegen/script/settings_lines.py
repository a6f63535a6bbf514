"""Turns a plan into the constants of a script, each with what it means behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from autopar.codegen.python_text import Source, identifier, literal, remark
from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.findings.loss_of_parts import Follows, loss_of_parts
from autopar.planner.graph import Graph
from autopar.planner.plan.plan import Model, Plan
from autopar.planner.plan.telling.chosen import CLIP_NORM, USUAL, is_scheduled_here
from autopar.planner.plan.telling.words import unit_word
from autopar.planner.precision import Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

_HALF_WORDS = "of weights and activations; gradients and optimizer are fp32; --dtype"
_DTYPE_WORDS = {
    Precision.FP32: "of weights, activations and gradients; --dtype",
    Precision.BF16: _HALF_WORDS,
    Precision.FP16: _HALF_WORDS,
}

_FEW = 8  # data ranks, each of whose rows a line has room for
_ZERO_WORDS = {
    Zero.NONE: "every data rank holds whole parameters, gradients and optimizer states",
    Zero.OPTIMIZER: "optimizer states are shared out over the data ranks of a shard",
    Zero.GRADIENTS: "gradients and optimizer states are shared out over the data ranks of a shard",
    Zero.PARAMETERS: "parameters, gradients and optimizer states are shared out over data ranks",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A constant and what it means."""

    name: str
    value: Source
    meaning: str


def lines(settings: Iterable[Setting]) -> Source:
    """Return an assignment on each line."""
    return Source(
        "\n".join(f"{identifier(s.name)} = {s.value}  {remark(s.meaning)}" for s in settings)
    )


def settings_of(plan: Plan) -> Iterator[Setting]:
    """Yield what a person may change without planning again."""
    yield Setting("STEPS", literal(100), "--steps")
    if not plan.model.has_optimizer:
        yield Setting("LEARNING_RATE", literal(USUAL.learning_rate), "of AdamW; --lr")
        yield Setting("BETAS", literal(USUAL.betas), "of AdamW; --betas")
        decayed = "of AdamW, on matrices: norms and biases have none; --weight-decay"
        yield Setting("WEIGHT_DECAY", literal(USUAL.weight_decay), decayed)
    if is_scheduled_here(plan):
        warmed = "to LEARNING_RATE, at most a tenth of all; --warmup-steps"
        yield Setting("WARMUP_STEPS", literal(USUAL.warmup_steps), warmed)
        final = "of LEARNING_RATE, to which a cosine falls by the last step"
        yield Setting("FINAL_SHARE", literal(USUAL.final_share), final)
    clipped = "of all gradients together, at most; 0: they stay as they are; --clip"
    yield Setting("CLIP_NORM", literal(CLIP_NORM), clipped)
    yield Setting("SEED", literal(0), "of weights, order of the data and dropout; --seed")
    precision = plan.arrangement.precision
    yield Setting("DTYPE", literal(precision.torch_name), _DTYPE_WORDS[precision])
    if scales_loss(plan):
        yield Setting("LOSS_SCALE", literal(2.0**15), "at first; halves when a gradient overflows")
        yield Setting("CALM_STEPS", literal(2000), "without overflow, and LOSS_SCALE doubles")
    kept = "file or folder of the trained weights, or none; --export"
    yield Setting("EXPORT", literal("model.safetensors"), kept)
    yield Setting(
        "CHECKPOINT", literal("none"), "folder of all that it takes to go on; --checkpoint"
    )
    yield Setting("CHECKPOINT_EVERY", literal(1000), "steps; --checkpoint-every")
    yield Setting("KEEP", literal(3), "checkpoints, the newest ones; --keep")
    checked = "compare the first loss with plain PyTorch's; --check-first-step"
    yield Setting("CHECK_FIRST_STEP", literal(whole_model_fits(plan)), checked)
    yield Setting("LOG_EVERY", literal(10), "steps; --log-every")
    if plan.model.has_dataset:
        yield Setting("WORKERS", literal(0), "processes that read ahead for this rank; --workers")
    if synchronises_batch_norms(plan):
        meaning = "over all data ranks, as one device would; False: on each"
        yield Setting("SYNC_BATCH_NORM", literal(True), meaning)


def whole_model_fits(plan: Plan) -> bool:
    """Whether the fullest device has room for all parameters beside what it holds in a step."""
    rank, memory = plan.fullest
    item_bytes = 2 if plan.arrangement.precision.is_half else 4
    left_bytes = plan.limit_bytes(rank) - memory.device_bytes
    return item_bytes * plan.model.parameters <= left_bytes


def evaluating() -> Iterator[Setting]:
    """Yield what a person may change of how a model is evaluated."""
    yield Setting("EVAL_EVERY", literal(1000), "steps to an evaluation; 0: none; --eval-every")


def scales_loss(plan: Plan) -> bool:
    """Whether gradients would be too small for their type: fp16 ends at 6e-8."""
    return plan.arrangement.precision is Precision.FP16


def sums_rows(plan: Plan) -> bool:
    """Whether the loss of a step is the sum of the losses of several parts of the batch."""
    is_whole = plan.arrangement.data * plan.arrangement.microbatches == 1
    return not is_whole and loss_of_parts(plan.graph).follows is Follows.SUM


def synchronises_batch_norms(plan: Plan) -> bool:
    """Whether the model has batch norms and several data ranks to take their statistics of."""
    return plan.arrangement.data > 1 and has_batch_norm(plan.graph)


def has_batch_norm(graph: Graph) -> bool:
    """Whether some op normalises over the batch."""
    return any(kind_of(op) is OpKind.BATCH_NORM for op in graph.ops)


def planned(plan: Plan) -> Iterator[Setting]:
    """Yield the arrangement, which memory and time were predicted for."""
    arranged = plan.arrangement
    yield Setting("PIPELINE", literal(arranged.pipeline), _pipeline_words(arranged))
    yield Setting("DATA", literal(arranged.data), "data ranks: each has rows of its own")
    yield Setting("TENSOR", literal(arranged.tensor), "tensor ranks: they share every microbatch")
    if arranged.rows:
        yield Setting("MICROBATCH", _each(arranged.rows), "rows at a time on each data rank")
    else:
        yield Setting("MICROBATCH", literal(arranged.microbatch), "rows at a time on a data rank")
    count = "of a data rank in a step, their gradients summed"
    yield Setting("MICROBATCHES", literal(arranged.microbatches), count)
    yield from _sharding(arranged)
    if arranged.pipeline > 1:
        schedule = "the order of forwards and backwards"
        yield Setting("SCHEDULE", literal(str(arranged.schedule)), schedule)
        per_rank = "of consecutive layers each"
        yield Setting("STAGES_PER_RANK", literal(arranged.stages_per_rank), per_rank)
    yield from _units(plan.model, arranged)
    yield Setting("PREDICTED", literal(_predicted(plan)), "device, seconds of a step, MFU")


def _predicted(plan: Plan) -> tuple[str, float, float]:
    """Return what a training is compared with, in no more digits than are predicted at all.

    CPUs are "cpu", however a cluster file calls them: on one, only their plans are compared.
    """
    device = plan.machines.device if plan.machines.backend != "gloo" else "cpu"
    figures = plan.prediction.step_seconds, plan.prediction.mfu
    step_seconds, mfu = (float(f"{figure:.4g}") for figure in figures)
    return device, step_seconds, mfu


def _each(rows: tuple[int, ...]) -> Source:
    """Return the rows of each data rank, of many as runs of equal ones."""
    if len(rows) <= _FEW:
        return literal(rows)
    runs = ((own, len(list(run))) for own, run in groupby(rows))
    return Source(" + ".join(f"({literal(own)},) * {literal(count)}" for own, count in runs))


def _pipeline_words(arranged: Arrangement) -> str:
    return "pipeline ranks: each has layers of its own" if arranged.pipeline > 1 else "no pipeline"


def _sharding(arranged: Arrangement) -> Iterator[Setting]:
    if arranged.zero > Zero.NONE:
        yield Setting(
            "SHARD", literal(arranged.shard), "data ranks that share one copy of the model's states"
        )
    yield Setting("ZERO", literal(arranged.zero.value), _ZERO_WORDS[arranged.zero])
    if arranged.data > 1:
        if arranged.zero < Zero.GRADIENTS:
            bucket = "gradients that travel together, beside the backward"
            yield Setting("BUCKET_BYTES", _in_mebibytes(arranged.bucket_bytes), bucket)
        if arranged.compressed_gradients:
            yield Setting("COMPRESS", literal(True), "gradients travel in 16 bits")


def _in_mebibytes(size_bytes: int) -> Source:
    mebibytes, rest = divmod(size_bytes, 2**20)
    return literal(size_bytes) if rest or not mebibytes else Source(f"{mebibytes} * 2**20")


def _units(model: Model, arranged: Arrangement) -> Iterator[Setting]:
    rows = "sum(MICROBATCH) * MICROBATCHES" if arranged.rows else "MICROBATCH * MICROBATCHES * DATA"
    yield Setting("GLOBAL_BATCH", Source(rows), f"{arranged.global_batch:,} rows of a step")
    name = f"{unit_word(model).upper()}_PER_STEP"
    if model.tokens_per_row == 1:
        yield Setting(name, Source("GLOBAL_BATCH"), "a row is one")
    else:
        per_row = Source(f"GLOBAL_BATCH * {literal(model.tokens_per_row)}")
        yield Setting(name, per_row, f"{model.tokens_per_row:,} of each row")
