"""Train llama (size=8b) on 8 devices.

The plan: pp 2 · dp 4, ZeRO-3, 1f1b, 16 microbatches of 1 row, recompute selective 4/35.

Run it on one node (its options: --help):
    torchrun --nproc-per-node 8 llama_8b_pp_zero.py
Or on 2 nodes; HOST is the first one's address, NODE 0 to 1:
    torchrun --nnodes 2 --nproc-per-node 4 --node-rank NODE --master-addr HOST llama_8b_pp_zero.py

Chosen here, as nobody said: 8 rows for each device (--global-batch); AdamW at a rate of 0.0003 with
a decay of 0.1 (build_optimizer); gradients clipped to a norm of 1 (CLIP_NORM).

Predicted on 8 × h100-sxm: 7.253 s per step, 72,288 tokens/s, 54.9% of the peak FLOPs
    compute 6.038 s, pipeline bubble 420.5 ms, exposed data parallel 717.3 ms
Communication of the busiest rank in a step:
    parameters gathered from the ranks that share them: 576 × all-gather over 4 ranks, 252.3 GiB,
      603.5 ms, waits 184.5 ms
    gradients summed over the ranks that share the data: 288 × reduce-scatter over 4 ranks,
      252.3 GiB, 586.9 ms, waits 532.8 ms
    activations and their gradients between stages: 16 × point-to-point over 2 ranks, 1 GiB,
      4.766 ms, waits 4.766 ms
Memory of the fullest device: 66.79 GiB of 67.2 GiB (99%)
    gradients 3.943 GiB, optimizer 11.83 GiB, activations 39.61 GiB, gathered 2.936 GiB, fragments
      4.67 GiB, context 3.75 GiB

Why this plan: of 4 ways to arrange the training none is faster; compute takes 84% of its step.
"""
# Written by autopar 0.1.0, which never overwrites changes by hand: 1fdfbbe9a5d35f61.

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autopar.runtime.data import Weighed, placed, read_batches, weighed_ahead
from autopar.runtime.data_parallel import wrap
from autopar.runtime.keeping import Keeper
from autopar.runtime.model import Crossing, StagePart, numbered, submodules
from autopar.runtime.optimizer import build_optimizer, clip_by_global_norm
from autopar.runtime.pipeline import Pipeline, Stage, build_schedule, stage_at, stage_indices
from autopar.runtime.ranks import Mesh, read_options, refuse_changes, seed_all, start, stop
from autopar.runtime.recompute import recompute
from autopar.runtime.weights import Recipe, load_weights, record

# where the model file is, seen from here: to be changed when either moves
sys.path.insert(0, str(Path(__file__).resolve().parent / "../../../models_zoo"))
import llama as model_file
from llama import Llama, rotary_table

# The functions of the model file, with the arguments that were planned for.
new_model = partial(model_file.build_model, size="8b")
new_batch = partial(model_file.example_batch, size="8b")
new_dataset = partial(model_file.build_dataset, size="8b")

# --------------------------------------------------------------------------------- settings

STEPS = 100  # --steps
LEARNING_RATE = 0.0003  # of AdamW; --lr
WEIGHT_DECAY = 0.1  # of AdamW
CLIP_NORM = 1.0  # of all gradients together, at most; 0: they stay as they are; --clip
SEED = 0  # of weights, order of the data and dropout; --seed
DTYPE = "bfloat16"  # of weights and activations; gradients and optimizer are fp32; --dtype
EXPORT = "model.safetensors"  # file or folder of the trained weights, or none; --export
CHECKPOINT = "none"  # folder of all that it takes to go on; --checkpoint
CHECKPOINT_EVERY = 1000  # steps; --checkpoint-every
KEEP = 3  # checkpoints, the newest ones; --keep
LOG_EVERY = 10  # steps; --log-every
WORKERS = 0  # processes that read ahead for this rank; --workers
new_optimizer = partial(AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

# --------------------------------------------------------------------------------- the plan

PIPELINE = 2  # pipeline ranks: each has layers of its own
DATA = 4  # data ranks: each has rows of its own
TENSOR = 1  # tensor ranks: they share every microbatch
MICROBATCH = 1  # rows at a time on a data rank
MICROBATCHES = 16  # of a data rank in a step, their gradients summed
SHARD = 4  # data ranks that share one copy of the model's states
ZERO = 3  # parameters, gradients and optimizer states are shared out over data ranks
SCHEDULE = "1f1b"  # the order of forwards and backwards
STAGES_PER_RANK = 1  # of consecutive layers each
GLOBAL_BATCH = MICROBATCH * MICROBATCHES * DATA  # 64 rows of a step
TOKENS_PER_STEP = GLOBAL_BATCH * 8192  # 8,192 of each row
PREDICTED = ("h100-sxm", 7.253, 0.5487)  # device, seconds of a step, MFU
MODEL_FILES = ("llama.py", "sizes.py", "token_data.py")  # that were planned
MODEL_DIGEST = "38c89f3bc2d2ae5a"  # of their text

# ---------------------------------------------------------- the classes that the plan changes


class FirstStage(Llama):
    """Stage 1 of 2 of Llama."""

    def forward(self, *, input_ids: Tensor, **_: Tensor) -> Tensor:  # type: ignore[override]
        """Map the batch to what the next stage takes."""
        x: Tensor = self.embed_tokens(input_ids)
        cos, sin = rotary_table(input_ids.shape[1], 128, 500000.0, like=x)
        for block in self.layers[:17]:
            x = block(x, cos, sin)
        return x


class LastStage(Llama):
    """Stage 2 of 2 of Llama."""

    def forward(self, x: Tensor, *, labels: Tensor, **_: Tensor) -> Tensor:  # type: ignore[override]
        """Map what the stage before gives to the loss."""
        cos, sin = rotary_table(x.shape[1], 128, 500000.0, like=x)
        for block in self.layers[17:]:
            x = block(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


def crossing(batch: Mapping[str, Tensor]) -> tuple[Crossing, ...]:
    """Return what a stage gives to the next of a microbatch."""
    return (Crossing((MICROBATCH, batch["input_ids"].shape[1], 4096)),)


LAYERS = ("embed_tokens", *numbered("layers.*", range(32)), "norm", "lm_head")
RECOMPUTED_IN_PART = numbered("layers.*", range(13, 17))
STAGES = (
    StagePart(FirstStage, ("embed_tokens", *numbered("layers.*", range(17))), crossing),
    StagePart(LastStage, (*numbered("layers.*", range(17, 32)), "norm", "lm_head")),
)

# -------------------------------------------------------------------------------- the model


def build_model(mesh: Mesh, dtype: torch.dtype, seed: int) -> tuple[Pipeline, Recipe]:
    """Build this rank's stages without memory, cut as planned, and how to make their weights."""
    stages = []
    for index in stage_indices(SCHEDULE, mesh.pipeline.rank, PIPELINE, STAGES_PER_RANK):
        model, recipe = record(new_model, seed=seed, dtype=dtype)  # a stage changes its model
        stages.append(build_stage(model, index, mesh, dtype))
    return build_schedule(SCHEDULE, stages, MICROBATCHES), recipe


def build_stage(model: nn.Module, index: int, mesh: Mesh, dtype: torch.dtype) -> Stage:
    """Turn the model into one stage: with the class of the stage, and only what that holds."""
    part = STAGES[index].taken_from(model, mesh.tensor)
    for layer in submodules(part, RECOMPUTED_IN_PART):
        recompute(layer, "selective")
    wrap(part, mesh, zero=ZERO, compute_dtype=dtype, units=submodules(part, LAYERS))
    return stage_at(index, STAGES, part, mesh, dtype=dtype)


def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return how much of the batch counts in the mean of the loss."""
    return (batch["labels"] != -100).sum()


def train_step(
    model: Pipeline, optimizer: Optimizer, microbatches: Sequence[Weighed], mesh: Mesh, clip: float
) -> tuple[Tensor, Tensor]:
    """Take one step over this rank's microbatches; return its part of the loss, and the norm."""
    loss = model.step(*zip(*microbatches, strict=True))  # all batches, all factors
    norm = clip_by_global_norm(model.parts, clip, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


# --------------------------------------------------------------------------------- the data


def batches(options: argparse.Namespace, mesh: Mesh, *, skip: int = 0) -> Iterator[Weighed]:
    """Return this rank's microbatches; the rows of a step are the same under every plan."""
    data = read_batches(
        new_batch,
        options,
        mesh,
        rows=(MICROBATCHES, MICROBATCH),
        new_dataset=new_dataset,
        skip=skip,
    )
    # The loss is a mean over what counts of the batch: microbatches weigh by what they have of it.
    weighed = weighed_ahead(data, valid_targets, mesh, microbatches=MICROBATCHES)
    return ((placed(batch, mesh, options.dtype), scale) for batch, scale in weighed)


# ------------------------------------------------------------------------------ the training


def main(argv: Sequence[str] | None = None) -> tuple[list[nn.Module], list[float]]:
    """Train; return what this rank holds of the model, and the losses that were logged."""
    options = parse_args(argv)
    mesh = start(pipeline=PIPELINE, data=DATA, tensor=TENSOR, shard=SHARD)
    refuse_changes(model_file, MODEL_FILES, MODEL_DIGEST)  # classes here are of what it was
    model, recipe = build_model(mesh, options.dtype, options.seed)
    # Where there is a checkpoint, the training goes on from it.
    keeper = Keeper(options, mesh, rows_per_step=GLOBAL_BATCH, model=MODEL_DIGEST)
    data = batches(options, mesh, skip=keeper.rows)
    load_weights(model.parts, recipe, options.weights, mesh)
    optimizer = build_optimizer(model.parts, new_optimizer, zero=ZERO, mesh=mesh, lr=options.lr)
    seed_all(options.seed, mesh)  # dropout differs from data rank to data rank
    keeper.take(model.parts, optimizer, recipe)
    losses: list[float] = []
    progress = keeper.progress(TOKENS_PER_STEP, "tokens", PREDICTED)
    for step in range(keeper.step + 1, options.steps + 1):
        rows = list(islice(data, MICROBATCHES))
        loss, norm = train_step(model, optimizer, rows, mesh, options.clip)
        if step % options.log_every == 0 or step == options.steps:
            losses.append(progress.log(step, loss, norm))
        keeper.after(step)
    keeper.export()
    stop(mesh)
    return model.parts, losses


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options of the command line; what is not given is as set above."""
    return read_options(
        argv,
        steps=STEPS,
        clip=CLIP_NORM,
        seed=SEED,
        dtype=DTYPE,
        log_every=LOG_EVERY,
        export=EXPORT,
        checkpoint=CHECKPOINT,
        checkpoint_every=CHECKPOINT_EVERY,
        keep=KEEP,
        workers=WORKERS,
    )


if __name__ == "__main__":
    main()
