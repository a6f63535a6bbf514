"""Train t5 (size=base) on 2 devices.

The plan: pp 2, 1f1b, 2 microbatches of 16 rows, compiled layers.

Run it on one node (its options: --help):
    torchrun --nproc-per-node 2 t5_pp.py
Or on 2 nodes; HOST is the first one's address, NODE 0 to 1:
    torchrun --nnodes 2 --nproc-per-node 1 --node-rank NODE --master-addr HOST t5_pp.py

Defaults: AdamW, learning rate 0.0003, betas (0.9, 0.95), weight decay 0.1 on matrices only (no
build_optimizer in the model file); linear warm-up over 2,000 steps, at most a tenth of all, then a
cosine down to 0.1 of that rate (no build_scheduler); gradients clipped to norm 1 (CLIP_NORM).

Predicted on 2 × h100-sxm: 42.92 ms per step, 381,760 tokens/s, 16.3% of the peak FLOPs
    compute 30.06 ms, pipeline bubble 7.655 ms, optimizer 2.644 ms, host overhead 2.24 ms, the rest
      320.4 us
Communication of the busiest rank in a step:
    activations and their gradients between stages (counted as pipeline bubble): 2 × point-to-point
      over 2 ranks, 29.34 MiB, 170 us, all of it exposed
    weights that the first and the last stage share: 1 × point-to-point over 2 ranks, 94.12 MiB,
      320.4 us, all of it exposed
Memory of the fullest device: 11 GiB of 68.8 GiB (16%)
    parameters 256.2 MiB, gradients 512.3 MiB, optimizer 1.501 GiB, activations 5.712 GiB, temporary
      copies 141.2 MiB, fragments 663.8 MiB, context 2.25 GiB, the rest 1.336 MiB

Why this plan: none of the 20 arrangements is faster. Compute + optimizer take 76% of the step.
"""
# Written by autopar 0.2.0 (checksum e202ce2e90813c7c, plan adea9f471b524dc2).
# Once you edit this file, autopar overwrites it only with --force.

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing import Keeper
from autopar.runtime.data import Weighed, read_batches, read_dataset
from autopar.runtime.data_parallel import wrap
from autopar.runtime.evaluation import PlainModel, check_first_step
from autopar.runtime.model import ROWS, Crossing, StagePart, compile_layers, expand
from autopar.runtime.optimizer import adamw, build_optimizer, clip_by_global_norm, warmup_cosine
from autopar.runtime.pipeline import Pipeline, Stage, Tie, build_schedule, stage_at, stage_indices
from autopar.runtime.ranks import (
    Mesh,
    read_options,
    refuse_changes,
    seed_all,
    start,
    stop,
    tell_errors_once,
)
from autopar.runtime.weights import Recipe, load_weights, record

if __name__ == "__main__":
    tell_errors_once()  # an error is one message, not a traceback of every rank

# The folder of the model file, relative to this script; change it when either moves.
sys.path.insert(0, str(Path(__file__).resolve().parent / "../../../models_zoo"))
import t5 as model_file
from t5 import T5

# What the model file defines, with the arguments of the plan.
new_model = partial(model_file.build_model, size="base")
new_batch = partial(model_file.example_batch, size="base")
new_dataset = partial(model_file.build_dataset, size="base")

# --------------------------------------------------------------------------------- settings

STEPS = 100  # --steps
LEARNING_RATE = 0.0003  # of AdamW; --lr
BETAS = (0.9, 0.95)  # of AdamW; --betas
WEIGHT_DECAY = 0.1  # of AdamW, on matrices: norms and biases have none; --weight-decay
WARMUP_STEPS = 2000  # steps in which the rate rises; at most a tenth of --steps; --warmup-steps
FINAL_SHARE = 0.1  # the cosine ends at this share of LEARNING_RATE
CLIP_NORM = 1.0  # largest norm of all gradients together; 0: no clipping; --clip
SEED = 0  # of weights, order of the data and dropout; --seed
DTYPE = "bfloat16"  # of weights and activations; gradients and optimizer are fp32; --dtype
EXPORT = "model.safetensors"  # file or folder of the trained weights, or none; --export
CHECKPOINT = "none"  # folder of checkpoints, or none; --checkpoint
CHECKPOINT_EVERY = 1000  # steps; --checkpoint-every
KEEP = 3  # how many of the newest checkpoints stay; --keep
CHECK_FIRST_STEP = True  # compare the first loss with plain PyTorch's; --check-first-step
LOG_EVERY = 10  # steps; --log-every
WORKERS = "auto"  # processes per rank that read ahead; auto: 2 for a GPU, 0 on CPUs; --workers

# --------------------------------------------------------------------------------- the plan

PIPELINE = 2  # pipeline-parallel ranks: each has some of the layers
MICROBATCH = 16  # rows of a microbatch
MICROBATCHES = 2  # per step; gradients are accumulated over them
SCHEDULE = "1f1b"  # the order of forwards and backwards
GLOBAL_BATCH = MICROBATCH * MICROBATCHES  # 32 rows per step
TOKENS_PER_STEP = GLOBAL_BATCH * 512  # 512 tokens per row
PREDICTED = ("h100-sxm", 0.04292, 0.1629)  # device, seconds per step, MFU
MODEL_FILES = ("sizes.py", "span_data.py", "t5.py", "token_data.py")  # Python files of the model
MODEL_DIGEST = "fac5c0a56db00bce"  # checksum of their code in the plan

# ---------------------------------------------------------- the classes that the plan changes


class FirstStage(T5):
    """Stage 1 of 2 of T5: shared, encoder 0 to 11, encoder_norm."""

    def forward(self, *, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the next stage's input from the batch."""
        x, bias = self.encoder[0](self.dropout(self.shared(input_ids)), None)
        for block in self.encoder[1:]:
            x, _ = block(x, bias)
        x = self.dropout(self.encoder_norm(x))
        return x, self.dropout(self.shared(F.pad(labels[:, :-1], (1, 0))))


class LastStage(T5):
    """Stage 2 of 2 of T5: decoder 0 to 11, decoder_norm."""

    def forward(self, x: Tensor, y: Tensor, *, labels: Tensor, **_: Tensor) -> Tensor:
        """Compute the loss from the previous stage's output."""
        y, bias = self.decoder[0](y, None, x)
        for block in self.decoder[1:]:
            y, _ = block(y, bias, x)
        x = self.dropout(self.decoder_norm(y))
        logits = F.linear(x * x.shape[-1] ** -0.5, self.shared.weight).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten())


def crossing(batch: Mapping[str, Tensor]) -> tuple[Crossing, ...]:
    """Return the shapes that a stage sends for a microbatch."""
    return (
        Crossing((ROWS, batch["input_ids"].shape[1], 768)),
        Crossing((ROWS, batch["labels"].shape[1], 768)),
    )


# each compiled by torch.compile
COMPILED = (*expand("encoder.*", range(12)), *expand("decoder.*", range(12)))
STAGES = (
    StagePart(FirstStage, ("shared", "encoder", "encoder_norm"), crossing),
    StagePart(LastStage, ("shared", "decoder", "decoder_norm")),
)
TIES = (Tie(("shared.weight",), (0, 1)),)  # shared weights, and their pipeline ranks

# -------------------------------------------------------------------------------- the model


def build_model(mesh: Mesh, dtype: torch.dtype, seed: int) -> tuple[Pipeline, Recipe]:
    """Build this rank's stages on the meta device; the recipe makes their weights later."""
    stages = []
    for index in stage_indices(SCHEDULE, mesh.pipeline.rank, PIPELINE):
        model, recipe = record(new_model, seed=seed, dtype=dtype)  # one copy for each stage
        stages.append(build_stage(model, index, mesh, dtype))
    return build_schedule(SCHEDULE, stages, MICROBATCHES, TIES), recipe


def build_stage(model: nn.Module, index: int, mesh: Mesh, dtype: torch.dtype) -> Stage:
    """Turn the model into one stage, which has only the modules that it runs."""
    part = STAGES[index].taken_from(model, mesh.tensor)
    compile_layers(part, COMPILED)
    wrap(part, mesh, compute_dtype=dtype)
    return stage_at(index, STAGES, part, mesh, dtype=dtype)


def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Count the targets in the batch that the loss averages over."""
    return (batch["labels"] != -100).sum()


def train_step(
    model: Pipeline, optimizer: Optimizer, microbatches: Sequence[Weighed], mesh: Mesh, clip: float
) -> tuple[Tensor, Tensor]:
    """Train on (batch, weight) pairs; return this rank's part of the loss and the gradient norm."""
    batches, weights = zip(*microbatches, strict=True)
    loss = model.step(batches, weights)
    model.tied.sum_gradients()
    norm = clip_by_global_norm(model.parts, clip, mesh, tied=model.tied.not_owned)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


# ------------------------------------------------------------------------------ the training


def main(argv: Sequence[str] | None = None) -> tuple[list[nn.Module], list[float]]:
    """Train; return this rank's modules, and the losses that were logged."""
    options = read_options(argv, globals())
    mesh = start(pipeline=PIPELINE, timeout=options.timeout)
    refuse_changes(model_file, MODEL_FILES, MODEL_DIGEST)  # the classes above contain their code
    model, recipe = build_model(mesh, options.dtype, options.seed)
    dataset = read_dataset(new_dataset, options, mesh)
    # Finds the newest checkpoint, if there is one; restore() below continues from it.
    keeper = Keeper(options, mesh, dataset, rows_per_step=GLOBAL_BATCH, model=MODEL_DIGEST)
    options.steps = keeper.steps  # --steps, or as many as --epochs takes
    # The loss is a mean over valid targets, so a microbatch is weighted by how many it has.
    data = read_batches(
        new_batch,
        options,
        mesh,
        rows=(MICROBATCHES, MICROBATCH),
        dataset=dataset,
        skip=keeper.rows,
        targets=valid_targets,
    )
    load_weights(model.parts, recipe, options.weights, mesh)
    new_optimizer = partial(
        adamw, lr=LEARNING_RATE, betas=options.betas, weight_decay=options.weight_decay
    )
    optimizer = build_optimizer(model.parts, new_optimizer, mesh=mesh, lr=options.lr)
    scheduler = warmup_cosine(
        optimizer, steps=options.steps, warmup=options.warmup_steps, final=FINAL_SHARE
    )
    if options.check_first_step and keeper.step == 0:
        plain = PlainModel(new_model, new_batch)  # the model on one device
        data = check_first_step(data, model.losses_of, model.parts, plain, options, mesh)
    seed_all(options.seed, mesh)  # each pipeline rank has its own dropout masks
    keeper.restore(model.parts, optimizer, recipe, scheduler=scheduler)
    losses = []
    progress = keeper.progress(TOKENS_PER_STEP, "tokens", PREDICTED)
    for step in range(keeper.step + 1, options.steps + 1):
        microbatches = list(islice(data, MICROBATCHES))
        loss, norm = train_step(model, optimizer, microbatches, mesh, options.clip)
        scheduler.step()
        if step % options.log_every == 0 or step == options.steps:
            losses.append(progress.log(step, loss, norm))
        keeper.after(step)
    keeper.export()
    stop(mesh)
    return model.parts, losses


if __name__ == "__main__":
    main()
