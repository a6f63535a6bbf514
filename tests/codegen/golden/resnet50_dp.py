"""Train resnet (size=50) on 8 devices.

The plan: dp 8, ZeRO-1, 1 microbatch of 64 rows, compiled layers.

Run it on one node (its options: --help):
    torchrun --nproc-per-node 8 resnet50_dp.py
Or on 2 nodes; HOST is the first one's address, NODE 0 to 1:
    torchrun --nnodes 2 --nproc-per-node 4 --node-rank NODE --master-addr HOST resnet50_dp.py

Defaults: gradients clipped to norm 1 (CLIP_NORM).

Predicted on 8 × h100-sxm: 15.59 ms per step, 32,844 samples/s, 10.1% of the peak FLOPs
    compute 11.99 ms, exposed data parallel 1.794 ms, host overhead 1.72 ms, the rest 80.83 us
Communication of the busiest rank in a step:
    parameters gathered over the data axis: 2 × all-gather over 8 ranks, 48.75 MiB, 198.5 us, all of
      it exposed
    gradients summed over the data axis: 4 × reduce-scatter over 8 ranks, 97.49 MiB, 397.1 us,
      103.6 us of it exposed
    statistics of batch norms over the data axis: 106 × all-gather over 8 ranks, 1.825 MiB,
      1.492 ms, all of it exposed
Memory of the fullest device: 5.299 GiB of 68.8 GiB (8%)
    gradients 122.3 MiB, activations 2.596 GiB, fragments 231.2 MiB, context 2.25 GiB, the rest
      109.8 MiB

Why this plan: none of the 4 arrangements is faster. Compute + optimizer take 77% of the step.
"""
# Written by autopar 0.2.0 (checksum a9ac9fe2fceecc6e, plan 4d3c3d11a8dabd5f).
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
from autopar.runtime.data import Batch, Weighed, in_float32, read_batches, read_dataset, scale_loss
from autopar.runtime.data_parallel import wrap
from autopar.runtime.evaluation import PlainModel, check_first_step, one_by_one
from autopar.runtime.model import compile_layers, expand
from autopar.runtime.optimizer import build_optimizer, build_scheduler, clip_by_global_norm
from autopar.runtime.ranks import (
    Mesh,
    read_options,
    seed_all,
    start,
    stop,
    tell_errors_once,
    warn_if_changed,
)
from autopar.runtime.weights import Recipe, load_weights, record

if __name__ == "__main__":
    tell_errors_once()  # an error is one message, not a traceback of every rank

# The folder of the model file, relative to this script; change it when either moves.
sys.path.insert(0, str(Path(__file__).resolve().parent / "../../../models_zoo"))
import resnet as model_file

# What the model file defines, with the arguments of the plan.
new_model = partial(model_file.build_model, size="50")
new_batch = partial(model_file.example_batch, size="50")
compute_loss = in_float32(model_file.loss)
new_dataset = partial(model_file.build_dataset, size="50")
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
SYNC_BATCH_NORM = True  # statistics over all data ranks, as on one device; False: over each alone

# --------------------------------------------------------------------------------- the plan

DATA = 8  # data-parallel ranks: each has its own rows of a batch
MICROBATCH = 64  # rows of a microbatch on each data rank
MICROBATCHES = 1  # per step; gradients are accumulated over them
ZERO = 1  # each data rank has a part of the optimizer states
GLOBAL_BATCH = MICROBATCH * MICROBATCHES * DATA  # 512 rows per step
PREDICTED = ("h100-sxm", 0.01559, 0.1009)  # device, seconds per step, MFU
IMAGES = ("images",)  # inputs to put in channels_last order, in which GPUs convolve faster
MODEL_FILES = ("image_data.py", "resnet.py", "sizes.py")  # Python files of the model
MODEL_DIGEST = "28733290967f22f2"  # checksum of their code in the plan

COMPILED = ("stem.1", *expand("blocks.*", range(16)), "fc")  # each compiled by torch.compile

# -------------------------------------------------------------------------------- the model


def build_model(mesh: Mesh, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Recipe]:
    """Build the model on the meta device; the recipe makes its weights later."""
    model, recipe = record(new_model, seed=seed, dtype=dtype)
    compile_layers(model, COMPILED)
    wrap(model, mesh, zero=ZERO, compute_dtype=dtype, sync_batch_norm=SYNC_BATCH_NORM)
    return model, recipe


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a microbatch."""
    outputs = model(images=batch["images"])
    return compute_loss(outputs, batch)


def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Count the targets in the batch that the loss averages over."""
    return (batch["labels"] != -100).sum()


def train_step(
    model: nn.Module, optimizer: Optimizer, microbatches: Sequence[Weighed], mesh: Mesh, clip: float
) -> tuple[Tensor, Tensor]:
    """Train on (batch, weight) pairs; return this rank's part of the loss and the gradient norm."""
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    for batch, weight in microbatches:
        loss = scale_loss(loss_of(model, batch), weight)
        loss.backward()
        total += loss.detach()
    norm = clip_by_global_norm([model], clip, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


# ------------------------------------------------------------------------------ the training


def main(argv: Sequence[str] | None = None) -> tuple[list[nn.Module], list[float]]:
    """Train; return this rank's modules, and the losses that were logged."""
    options = read_options(argv, globals())
    mesh = start(data=DATA, timeout=options.timeout)
    warn_if_changed(model_file, MODEL_FILES, MODEL_DIGEST, mesh)
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
        may_repeat=False,  # ops mix the rows of a microbatch, so it must not contain a row twice
        targets=valid_targets,
        channels_last=IMAGES,
    )
    load_weights([model], recipe, options.weights, mesh)
    optimizer = build_optimizer([model], new_optimizer, zero=ZERO, mesh=mesh, lr=options.lr)
    scheduler = build_scheduler(new_scheduler, optimizer, steps=options.steps, mesh=mesh)
    if options.check_first_step and keeper.step == 0:
        plain = PlainModel(new_model, new_batch, compute_loss)  # the model on one device
        data = check_first_step(
            data, one_by_one(partial(loss_of, model)), [model], plain, options, mesh
        )
    seed_all(options.seed, mesh)
    keeper.restore([model], optimizer, recipe, scheduler=scheduler)
    losses = []
    progress = keeper.progress(GLOBAL_BATCH, "samples", PREDICTED)
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
