"""Train llama (size=8b, layers=12) on 16 devices.

The plan: pp 4 · dp 2 · tp 2, ZeRO-3, 1f1b, 16 microbatches of 1 row, compiled layers.

Run it on each of 2 nodes; HOST is the first one's address, NODE 0 to 1:
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank NODE --master-addr HOST llama_8b_tp_pp_dp.py

Defaults: AdamW, learning rate 0.0003, betas (0.9, 0.95), weight decay 0.1 on matrices only (no
build_optimizer in the model file); linear warm-up over 2,000 steps, at most a tenth of all, then a
cosine down to 0.1 of that rate (no build_scheduler); gradients clipped to norm 1 (CLIP_NORM).

Predicted on 16 × h100-sxm: 1.017 s per step, 257,878 tokens/s, 39.9% of the peak FLOPs
    compute 696 ms, tensor communication 63.94 ms, pipeline bubble 167.1 ms, exposed data parallel
      71.76 ms, the rest 17.69 ms
Communication of the busiest rank in a step:
    activations split over the tensor axis: over 2 ranks, 63.93 ms, all of it exposed
    parameters gathered over the data axis: 128 × all-gather over 2 ranks, 26 GiB, 44.51 ms,
      18.16 ms of it exposed
    gradients summed over the data axis: 64 × reduce-scatter over 2 ranks, 26 GiB, 42.3 ms, all of
      it exposed
    gradients of parameters that are whole on the tensor axis: 1 × all-reduce over 2 ranks, 128 KiB,
      10.75 us, 10.24 us of it exposed
    activations and their gradients between stages (counted as pipeline bubble): 32 × point-to-point
      over 2 ranks, 1 GiB, 33.89 ms, all of it exposed
Memory of the fullest device: 22.32 GiB of 68.8 GiB (32%)
    gradients 1.588 GiB, optimizer 4.764 GiB, activations 7.147 GiB, temporary copies 2.936 GiB,
      fragments 1.32 GiB, context 4.5 GiB, the rest 64 MiB

Why this plan: its layouts are simpler than the fastest plan's (1.009 s), and its step 0.75% longer;
none of the 4 arrangements is faster than 1.009 s. Compute + optimizer take 69% of the step.
"""
# Written by autopar 0.2.0 (checksum 4ee417b005776021, plan 320b8896fea87fdb).
# Once you edit this file, autopar overwrites it only with --force.

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing import Keeper
from autopar.runtime.data import Weighed, read_batches, read_dataset
from autopar.runtime.data_parallel import wrap
from autopar.runtime.evaluation import PlainModel, check_first_step
from autopar.runtime.model import (
    ROWS,
    Crossing,
    StagePart,
    compile_layers,
    expand,
    shard_parameters,
    submodules,
    use_classes,
)
from autopar.runtime.optimizer import (
    adamw,
    build_optimizer,
    clip_by_global_norm,
    sum_replicated,
    warmup_cosine,
)
from autopar.runtime.pipeline import Pipeline, Stage, build_schedule, stage_at, stage_indices
from autopar.runtime.ranks import (
    Axis,
    Mesh,
    read_options,
    refuse_changes,
    seed_all,
    start,
    stop,
    tell_errors_once,
)
from autopar.runtime.tensor import (
    Split,
    gather,
    scatter_sum,
    take_shard,
    vocab_parallel_cross_entropy,
)
from autopar.runtime.weights import Recipe, load_weights, record

if __name__ == "__main__":
    tell_errors_once()  # an error is one message, not a traceback of every rank

# The folder of the model file, relative to this script; change it when either moves.
sys.path.insert(0, str(Path(__file__).resolve().parent / "../../../models_zoo"))
import llama as model_file
from llama import Block, Llama, rotary_table

# What the model file defines, with the arguments of the plan.
new_model = partial(model_file.build_model, size="8b", layers=12)
new_batch = partial(model_file.example_batch, size="8b")
new_dataset = partial(model_file.build_dataset, size="8b")

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

PIPELINE = 4  # pipeline-parallel ranks: each has some of the layers
DATA = 2  # data-parallel ranks: each has its own rows of a batch
TENSOR = 2  # tensor-parallel ranks: each has a shard of the tensors that are split
MICROBATCH = 1  # rows of a microbatch on each data rank
MICROBATCHES = 16  # per step; gradients are accumulated over them
ZERO = 3  # each data rank has a part of the parameters, gradients and optimizer states
SCHEDULE = "1f1b"  # the order of forwards and backwards
GLOBAL_BATCH = MICROBATCH * MICROBATCHES * DATA  # 32 rows per step
TOKENS_PER_STEP = GLOBAL_BATCH * 8192  # 8,192 tokens per row
PREDICTED = ("h100-sxm", 1.017, 0.3991)  # device, seconds per step, MFU
MODEL_FILES = ("llama.py", "sizes.py", "token_data.py")  # Python files of the model
MODEL_DIGEST = "20c2535ae7ba3105"  # checksum of their code in the plan

# ---------------------------------------------------------- the classes that the plan changes


class TensorParallelBlock(Block):
    """Block with seq, kv_heads and ffn split over the tensor axis."""

    tensor: Axis

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Do what Block does, on this rank's share."""
        # gathers all of seq; the next ops are split along kv_heads
        y = self.self_attn(gather(self.input_layernorm(x), 1, self.tensor), cos, sin)
        # partial sums over kv_heads, added up into shards of seq
        x = x + scatter_sum(y, 1, self.tensor)
        # gathers all of seq; the next ops are split along ffn
        y = self.mlp(gather(self.post_attention_layernorm(x), 1, self.tensor))
        # partial sums over ffn, added up into shards of seq
        return x + scatter_sum(y, 1, self.tensor)


class FirstStage(Llama):
    """Stage 1 of 4 of Llama: embed_tokens, layers 0 to 2."""

    tensor: Axis

    def forward(self, *, input_ids: Tensor, **_: Tensor) -> Tensor:
        """Compute the next stage's input from the batch."""
        x = self.embed_tokens(input_ids)
        cos, sin = rotary_table(input_ids.shape[1], self.head_dim, self.rope_theta, like=x)
        x = take_shard(x, 1, self.tensor)  # each rank takes its shard of seq
        for block in self.layers[:3]:
            x = block(x, cos, sin)
        return x


class MiddleStage(Llama):
    """A stage between the first and the last of Llama: layers `first` to `end - 1`."""

    first: int
    end: int

    def forward(self, x: Tensor, *, input_ids: Tensor, **_: Tensor) -> Tensor:
        """Compute the next stage's input from the previous stage's output."""
        cos, sin = rotary_table(input_ids.shape[1], self.head_dim, self.rope_theta, like=x)
        for block in self.layers[self.first : self.end]:
            x = block(x, cos, sin)
        return x


class LastStage(Llama):
    """Stage 4 of 4 of Llama: layers.11, norm, lm_head."""

    tensor: Axis

    def forward(self, x: Tensor, *, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss from the previous stage's output."""
        cos, sin = rotary_table(input_ids.shape[1], self.head_dim, self.rope_theta, like=x)
        x = self.layers[11](x, cos, sin)
        # gathers all of seq; the next ops are split along vocab
        logits = self.lm_head(gather(self.norm(x), 1, self.tensor)).flatten(0, 1)
        return vocab_parallel_cross_entropy(logits, labels.flatten(), self.tensor)


def crossing(batch: Mapping[str, Tensor]) -> tuple[Crossing, ...]:
    """Return the shapes that a stage sends for a microbatch, and how tensor ranks split them."""
    return (Crossing((ROWS, batch["input_ids"].shape[1], 4096), Split(1)),)


CLASSES = {
    "layers.*": TensorParallelBlock,
}
SPLITS = {  # Split(dim): each tensor rank holds a shard along this dim
    "layers.*.self_attn.q_proj.weight": Split(0),  # kv_heads
    "layers.*.self_attn.k_proj.weight": Split(0),  # kv_heads
    "layers.*.self_attn.v_proj.weight": Split(0),  # kv_heads
    "layers.*.self_attn.o_proj.weight": Split(1),  # kv_heads
    "layers.*.mlp.gate_proj.weight": Split(0),  # ffn
    "layers.*.mlp.up_proj.weight": Split(0),  # ffn
    "layers.*.mlp.down_proj.weight": Split(1),  # ffn
    "lm_head.weight": Split(0),  # vocab
}
# whole on each tensor rank; train_step adds up their gradients over the ranks
REPLICATED = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
LAYERS = ("embed_tokens", *expand("layers.*", range(12)), "norm", "lm_head")  # gathered one by one
COMPILED = (*expand("layers.*", range(12)), "lm_head")  # each compiled by torch.compile
STAGES = (
    StagePart(FirstStage, ("embed_tokens", *expand("layers.*", range(3))), crossing),
    StagePart(
        MiddleStage, expand("layers.*", range(3, 7)), crossing, bounds={"first": 3, "end": 7}
    ),
    StagePart(
        MiddleStage, expand("layers.*", range(7, 11)), crossing, bounds={"first": 7, "end": 11}
    ),
    StagePart(LastStage, ("layers.11", "norm", "lm_head")),
)

# -------------------------------------------------------------------------------- the model


def build_model(mesh: Mesh, dtype: torch.dtype, seed: int) -> tuple[Pipeline, Recipe]:
    """Build this rank's stages on the meta device; the recipe makes their weights later."""
    stages = []
    for index in stage_indices(SCHEDULE, mesh.pipeline.rank, PIPELINE):
        model, recipe = record(new_model, seed=seed, dtype=dtype)  # one copy for each stage
        stages.append(build_stage(model, index, mesh, dtype))
    return build_schedule(SCHEDULE, stages, MICROBATCHES), recipe


def build_stage(model: nn.Module, index: int, mesh: Mesh, dtype: torch.dtype) -> Stage:
    """Turn the model into one stage, which has only the modules that it runs."""
    shard_parameters(model, SPLITS, mesh.tensor)
    part = STAGES[index].taken_from(model, mesh.tensor)
    use_classes(part, CLASSES, mesh.tensor)
    compile_layers(part, COMPILED)
    wrap(part, mesh, zero=ZERO, compute_dtype=dtype, units=submodules(part, LAYERS))
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
    sum_replicated(model.parts, REPLICATED, mesh.tensor)
    norm = clip_by_global_norm(model.parts, clip, mesh, split=SPLITS)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


# ------------------------------------------------------------------------------ the training


def main(argv: Sequence[str] | None = None) -> tuple[list[nn.Module], list[float]]:
    """Train; return this rank's modules, and the losses that were logged."""
    options = read_options(argv, globals())
    mesh = start(pipeline=PIPELINE, data=DATA, tensor=TENSOR, timeout=options.timeout)
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
    load_weights(model.parts, recipe, options.weights, mesh, splits=SPLITS)
    new_optimizer = partial(
        adamw, lr=LEARNING_RATE, betas=options.betas, weight_decay=options.weight_decay
    )
    optimizer = build_optimizer(model.parts, new_optimizer, zero=ZERO, mesh=mesh, lr=options.lr)
    scheduler = warmup_cosine(
        optimizer, steps=options.steps, warmup=options.warmup_steps, final=FINAL_SHARE
    )
    if options.check_first_step and keeper.step == 0:
        plain = PlainModel(new_model, new_batch)  # the model on one device
        data = check_first_step(data, model.losses_of, model.parts, plain, options, mesh)
    seed_all(options.seed, mesh)
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
