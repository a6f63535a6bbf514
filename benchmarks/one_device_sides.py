"""Times a training on one device: an emitted script's, and plain PyTorch's in two manners.

Each runs in a process of its own, so that none finds the memory of another. All of them start from
the same weights, train on the same rows, clip, and step the same optimizer with its fused kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autopar.codegen.proof.script_rank import imported
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.trace.build import Step, build
from autopar.runtime.data.batches import placed, synthetic_batches
from autopar.runtime.optimizer import adamw
from autopar.runtime.ranks.mesh import Mesh, start
from autopar.runtime.weights import initial_weights
from benchmarks.script_step import mesh_of, step_of

SEED, MAX_NORM = 0, 1.0  # as scripts have them
STEPS_TO_WARM_UP = 3
FEWEST_STEPS = 5

TrainStep: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train."""

    script: Path
    spec: str
    arguments: tuple[str, ...]
    rows: int  # of a step, which is one microbatch
    recomputed: str | None  # which modules, as a pattern
    seconds: float  # for the steps that count


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the steps of one training took."""

    seconds: tuple[float, ...]
    peak_bytes: int | None  # of the device; torch does not count a CPU's
    loss: float  # of the last step that warms up


def taken(side: str, job: Job) -> Taken | None:
    """Run a training in a fresh process; None where it does not fit into the device."""
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with fresh as processes:
        return processes.submit(_taken, side, job).result()


def _taken(side: str, job: Job) -> Taken | None:
    torch.set_num_threads(1)  # as torchrun sets it
    try:
        step, device = SIDES[side](job)
        return _timed(step, device, job.seconds)
    except torch.OutOfMemoryError:
        return None


def _timed(step: TrainStep, device: torch.device, seconds: float) -> Taken:
    is_gpu = device.type == "cuda"

    def seconds_of_a_step() -> float:
        began = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(STEPS_TO_WARM_UP - 1):
        seconds_of_a_step()
    loss = float(step())
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = max(FEWEST_STEPS, round(seconds / seconds_of_a_step()))
    measured = tuple(seconds_of_a_step() for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() if is_gpu else None
    return Taken(seconds=measured, peak_bytes=peak, loss=loss)


def _script(job: Job) -> tuple[TrainStep, torch.device]:
    script = imported(job.script)
    mesh = mesh_of(script)
    return step_of(script, mesh), mesh.device


def _autocast(job: Job) -> tuple[TrainStep, torch.device]:
    """Weights in fp32, and matrix products in bf16 by autocast: what most people write."""
    plain = _Plain(job, dtype=torch.float32)
    parameters = list(plain.model.parameters())
    optimizer = plain.optimizer(parameters)

    def step() -> Tensor:
        with torch.autocast(plain.mesh.device.type, torch.bfloat16):
            loss = plain.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, plain.mesh.device


def _masters(job: Job) -> tuple[TrainStep, torch.device]:
    """Weights in bf16 beside an fp32 copy that the optimizer steps: what emitted scripts do."""
    plain = _Plain(job, dtype=torch.bfloat16)
    parameters = list(plain.model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = plain.optimizer(masters)

    def step() -> Tensor:
        loss = plain.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        clip_grad_norm_(masters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([p.data for p in parameters], [m.data for m in masters])
        return loss.detach()

    return step, plain.mesh.device


SIDES = {"script": _script, "autocast": _autocast, "masters": _masters}
BY_HAND = ("autocast", "masters")


class _Plain:
    """The model file's own model, batch and optimizer on this process' device."""

    def __init__(self, job: Job, *, dtype: torch.dtype) -> None:
        self._file = load_model_file(job.spec, job.arguments)
        self.mesh: Mesh = start(pipeline=1, data=1, tensor=1)
        whole = initial_weights.build(self._file.build_model, seed=SEED)
        self.model = whole.to(self.mesh.device, dtype)
        if job.recomputed is not None:
            _recompute(self.model, job.recomputed)
        self._step = _step_of(self._file, self.model, job)
        drawn = synthetic_batches(
            self._file.example_batch, self.mesh, rows=(1, job.rows), seed=SEED
        )
        self._batch = placed(next(drawn), self.mesh, torch.float32)

    def loss(self) -> Tensor:
        """Return the loss of the step's rows."""
        return self._step.run(self._batch)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the file's optimizer, or the one that scripts have in its place."""
        usual = partial(adamw, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        made: Optimizer = (self._file.build_optimizer or usual)(parameters)
        for group in made.param_groups:
            group["fused"] = True
        return made


def _step_of(file: ModelFile, model: nn.Module, job: Job) -> Step:
    keys = build(file, device="meta", dtype=None, batch_size=job.rows).step.keys
    return Step(model, file.loss, keys, path=file.path)


def _recompute(model: nn.Module, pattern: str) -> None:
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
