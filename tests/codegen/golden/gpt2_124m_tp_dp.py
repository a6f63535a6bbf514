"""Train gpt2 (size=124m) on 8 devices.

The plan: dp 4 · tp 2, ZeRO-1, 1 microbatch of 16 rows, compiled layers.

Run it on one node (its options: --help):
    torchrun --nproc-per-node 8 gpt2_124m_tp_dp.py
Or on 2 nodes; HOST is the first one's address, NODE 0 to 1:
    torchrun --nnodes 2 --nproc-per-node 4 --node-rank NODE --master-addr HOST gpt2_124m_tp_dp.py

Defaults: gradients clipped to norm 1 (CLIP_NORM).

Predicted on 8 × h100-sxm: 34.98 ms per step, 1,873,473 tokens/s, 20.7% of the peak FLOPs
    compute 28.15 ms, tensor communication 3.356 ms, exposed data parallel 1.188 ms, optimizer
      566.4 us, host overhead 1.72 ms
Communication of the busiest rank in a step:
    activations split over the tensor axis: over 2 ranks, 2.586 ms, all of it exposed
    parameters gathered over the data axis: 3 × all-gather over 4 ranks, 217.1 MiB, 577.9 us, all of
      it exposed
    gradients summed over the data axis: 3 × reduce-scatter over 4 ranks, 434.1 MiB, 1.1 ms,
      609.6 us of it exposed
    gradients of parameters that are whole on the tensor axis: 1 × all-reduce over 2 ranks,
      243.4 MiB, 769.2 us, all of it exposed
Memory of the fullest device: 12.71 GiB of 68.8 GiB (18%)
    parameters 217.1 MiB, gradients 434.1 MiB, optimizer 325.6 MiB, activations 4.27 GiB, work space
      3.068 GiB, fragments 679.3 MiB, context 3.75 GiB

Why this plan: its layouts are simpler than the fastest plan's (34.35 ms), and its step 1.84%
longer; none of the 20 arrangements is faster than 34.35 ms. Compute + optimizer take 82% of the
step.
"""
# Written by autopar 0.2.0 (checksum faf78373e3107227, plan 6664b727f25a9194).
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
from autopar.runtime.data import Batch, Weighed, in_float32, read_batches, read_dataset, scale_loss
from autopar.runtime.data_parallel import wrap
from autopar.runtime.evaluation import PlainModel, check_first_step, one_by_one
from autopar.runtime.model import compile_layers, expand, shard_parameters, use_classes
from autopar.runtime.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_by_global_norm,
    sum_replicated,
)
from autopar.runtime.ranks import (
    Axis,
    Mesh,
    read_options,
    refuse_changes,
    seed_all,
    split_randomness,
    start,
    stop,
    tell_errors_once,
)
from autopar.runtime.tensor import Split, exchange, gather, take_shard, vocab_parallel_cross_entropy
from autopar.runtime.weights import Recipe, load_weights, record

if __name__ == "__main__":
    tell_errors_once()  # an error is one message, not a traceback of every rank

# The folder of the model file, relative to this script; change it when either moves.
sys.path.insert(0, str(Path(__file__).resolve().parent / "../../../models_zoo"))
import gpt2 as model_file
from gpt2 import GPT2, SelfAttention

# What the model file defines, with the arguments of the plan.
new_model = partial(model_file.build_model, size="124m")
new_batch = partial(model_file.example_batch, size="124m")
compute_loss = in_float32(model_file.loss)
new_dataset = partial(model_file.build_dataset, size="124m")
new_optimizer = model_file.build_optimizer
new_scheduler = model_file.build_scheduler

# --------------------------------------------------------------------------------- settings

STEPS = 100  # --steps
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

DATA = 4  # data-parallel ranks: each has its own rows of a batch
TENSOR = 2  # tensor-parallel ranks: each has a shard of the tensors that are split
MICROBATCH = 16  # rows of a microbatch on each data rank
MICROBATCHES = 1  # per step; gradients are accumulated over them
ZERO = 1  # each data rank has a part of the optimizer states
BUCKET_BYTES = 100 * 2**20  # gradients are sent in buckets of this size, during the backward
GLOBAL_BATCH = MICROBATCH * MICROBATCHES * DATA  # 64 rows per step
TOKENS_PER_STEP = GLOBAL_BATCH * 1024  # 1,024 tokens per row
PREDICTED = ("h100-sxm", 0.03498, 0.2068)  # device, seconds per step, MFU
MODEL_FILES = ("gpt2.py", "sizes.py", "token_data.py")  # Python files of the model
MODEL_DIGEST = "5170b143abbd7c93"  # checksum of their code in the plan

# ---------------------------------------------------------- the classes that the plan changes


class TensorParallelSelfAttention(SelfAttention):
    """SelfAttention with heads and seq split over the tensor axis."""

    tensor: Axis

    def forward(self, x: Tensor) -> Tensor:
        """Do what SelfAttention does, on this rank's share."""
        local_seq = x.shape[1]
        x = gather(x, 1, self.tensor)  # gathers all of seq; the next ops are split along heads
        batch, seq, _ = x.shape
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = q.view(batch, seq, -1, self.head_dim).transpose(1, 2)
        k = k.view(batch, seq, -1, self.head_dim).transpose(1, 2)
        v = v.view(batch, seq, -1, self.head_dim).transpose(1, 2)
        with split_randomness(self.tensor):
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        # from shards of heads to shards of seq; parts: (number of blocks, elements of a block)
        y = exchange(y.transpose(1, 2), 2, 1, self.tensor, gather_parts=((12, 1),))
        y = self.c_proj(y.reshape(batch, local_seq, -1))
        with split_randomness(self.tensor):
            return F.dropout(y, self.dropout, self.training)


class TensorParallelGPT2(GPT2):
    """GPT2 with seq, heads and vocab split over the tensor axis."""

    tensor: Axis

    def forward(self, input_ids: Tensor) -> Tensor:
        """Do what GPT2 does, on this rank's share."""
        x = self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        # each rank takes its shard of seq
        x = take_shard(self.drop(self.wte(input_ids) + x), 1, self.tensor)
        with split_randomness(self.tensor):
            for block in self.h:
                x = block(x)
        # gathers all of seq; the next ops are split along vocab
        x = gather(self.ln_f(x), 1, self.tensor)
        return F.linear(x, take_shard(self.lm_head.weight, 0, self.tensor))


def split_loss(outputs: Tensor, batch: Mapping[str, Tensor], tensor: Axis) -> Tensor:
    """Return the loss of outputs that are split over the tensor axis."""
    logits = outputs.float().flatten(0, 1)
    # parts: (number of blocks, elements of a block)
    return vocab_parallel_cross_entropy(
        logits, batch["labels"].flatten(), tensor, parts=((50257, 1),)
    )


CLASSES = {
    "h.*.attn": TensorParallelSelfAttention,
    "": TensorParallelGPT2,
}
SPLITS = {  # Split(dim, parts); a part is (blocks, elements of a block), and blocks stay whole
    "h.*.attn.c_attn.weight": Split(0, ((12, 64),) * 3),  # heads
    "h.*.attn.c_attn.bias": Split(0, ((12, 64),) * 3),  # heads
}
# whole on each tensor rank; train_step adds up their gradients, in buckets of their own
REPLICATED = ("h.*.ln_1", "h.*.attn.c_proj", "h.*.ln_2", "h.*.mlp", "ln_f")
COMPILED = expand("h.*", range(12))  # each compiled by torch.compile

# -------------------------------------------------------------------------------- the model


def build_model(mesh: Mesh, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Recipe]:
    """Build the model on the meta device; the recipe makes its weights later."""
    model, recipe = record(new_model, seed=seed, dtype=dtype)
    shard_parameters(model, SPLITS, mesh.tensor)
    use_classes(model, CLASSES, mesh.tensor)
    compile_layers(model, COMPILED)
    wrap(model, mesh, zero=ZERO, compute_dtype=dtype, bucket_bytes=BUCKET_BYTES, apart=[REPLICATED])
    return model, recipe


def loss_of(model: nn.Module, batch: Batch, tensor: Axis) -> Tensor:
    """Return the mean loss of a microbatch."""
    outputs = model(input_ids=batch["input_ids"])
    return split_loss(outputs, batch, tensor)


def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Count the targets in the batch that the loss averages over."""
    return (batch["labels"] != -100).sum()


def train_step(
    model: nn.Module, optimizer: Optimizer, microbatches: Sequence[Weighed], mesh: Mesh, clip: float
) -> tuple[Tensor, Tensor]:
    """Train on (batch, weight) pairs; return this rank's part of the loss and the gradient norm."""
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    for batch, weight in microbatches:
        loss = scale_loss(loss_of(model, batch, mesh.tensor), weight)
        loss.backward()
        total += loss.detach()
    sum_replicated([model], REPLICATED, mesh.tensor)
    norm = clip_by_global_norm([model], clip, mesh, split=SPLITS)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


# ------------------------------------------------------------------------------ the training


def main(argv: Sequence[str] | None = None) -> tuple[list[nn.Module], list[float]]:
    """Train; return this rank's modules, and the losses that were logged."""
    options = read_options(argv, globals())
    mesh = start(data=DATA, tensor=TENSOR, timeout=options.timeout)
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
    load_weights([model], recipe, options.weights, mesh, splits=SPLITS)
    optimizer = build_optimizer([model], new_optimizer, zero=ZERO, mesh=mesh, lr=options.lr)
    scheduler = build_scheduler(new_scheduler, optimizer, steps=options.steps, mesh=mesh)
    if options.check_first_step and keeper.step == 0:
        plain = PlainModel(new_model, new_batch, compute_loss)  # the model on one device
        data = check_first_step(
            data,
            one_by_one(partial(loss_of, model, tensor=mesh.tensor)),
            [model],
            plain,
            options,
            mesh,
        )
    seed_all(options.seed, mesh)  # each data rank has its own dropout masks
    keeper.restore([model], optimizer, recipe, scheduler=scheduler)
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
    return [model], losses


if __name__ == "__main__":
    main()
