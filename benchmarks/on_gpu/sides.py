"""Times trainings on one device: an emitted script, and plain PyTorch, each compiled or not.

Each runs in a fresh process, so that none finds memory that another has left. All start from the
same weights, train on the same rows, clip, and step the same optimizer with its fused kernel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from autopar.codegen.proof.script_rank import imported
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace.build import build
from autopar.runtime.data.batches import synthetic_batches
from autopar.runtime.data.loss import in_float32, loss_in
from autopar.runtime.data.rows import to_device
from autopar.runtime.optimizer import adamw
from autopar.runtime.ranks.mesh import Mesh, start
from autopar.runtime.weights import initial_weights
from benchmarks.on_gpu.kernels import Kernels, kernels_of
from benchmarks.on_gpu.phases import memory_of
from benchmarks.on_gpu.ranks.joining import joined_alone
from benchmarks.script_step import mesh_of, step_of

SEED, MAX_NORM = 0, 1.0  # as scripts have them
STEPS_TO_WARM_UP = 3
_MOST_SHAPES = 64
FEWEST_STEPS, MOST_STEPS = 5, 100

TrainStep: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train."""

    script: Path
    spec: str
    arguments: tuple[str, ...]
    rows: int  # of a step, which is one microbatch
    seconds: float  # for the steps that are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the steps of one training took."""

    seconds: tuple[float, ...]
    peak_bytes: int | None  # of the device; torch does not count a CPU's
    loss: float  # of the last warm-up step
    seconds_before: float  # until the first step that is measured
    kernels: Kernels | None = None
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The median of the steps."""
        return median(self.seconds)


def taken(side: str, job: Job) -> Taken:
    """Run a training in this fresh process, and return what its steps took."""
    began = time.perf_counter()
    kind, _, compiles = side.partition(", ")
    make = {"script": _script, "plain": _masters, "autocast": _autocast}[kind]
    is_gpu = torch.cuda.is_available()
    torch.set_num_threads((os.cpu_count() or 1) if is_gpu else 1)  # weights are made by the CPU
    with joined_alone("cuda" if is_gpu else "cpu"):
        step, device = make(job, compile_layers if compiles else _as_they_are)
        return _timed(step, device, job.seconds, began)


def _timed(step: TrainStep, device: torch.device, seconds: float, began: float) -> Taken:
    is_gpu = device.type == "cuda"

    def seconds_of_a_step() -> float:
        begun = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for _ in range(STEPS_TO_WARM_UP - 1):
        seconds_of_a_step()
    loss = float(step())
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = min(max(FEWEST_STEPS, round(seconds / seconds_of_a_step())), MOST_STEPS)
    before = time.perf_counter() - began
    measured = tuple(seconds_of_a_step() for _ in range(steps))
    return Taken(
        seconds=measured,
        peak_bytes=torch.cuda.max_memory_allocated() if is_gpu else None,
        loss=loss,
        seconds_before=before,
        kernels=kernels_of(step) if is_gpu else None,
        memory=memory_of(step) if is_gpu else {},
    )


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a model separately, as torchtitan does."""
    torch._dynamo.config.recompile_limit = _MOST_SHAPES  # blocks of a ResNet are of many shapes
    for layer in layers_of(model):
        layer.compile(fullgraph=True, dynamic=False)


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost lists of modules, or the model if it has no lists."""
    lists = (nn.ModuleList, nn.Sequential)
    found = [one for one in model.modules() if isinstance(one, lists) and len(one) > 1]
    inner = {id(below) for one in found for below in one.modules() if below is not one}
    outer = [one for one in found if id(one) not in inner]
    if not outer:
        yield model
    for one in outer:
        yield from one


def _as_they_are(_: nn.Module) -> None:
    """Compile nothing."""


def _script(job: Job, prepare: Callable[[nn.Module], None]) -> tuple[TrainStep, torch.device]:
    script: Any = imported(job.script)
    build_model = script.build_model

    def built(*args: Any) -> Any:
        model, recipe = build_model(*args)
        prepare(model)
        return model, recipe

    script.build_model = built
    mesh = mesh_of(script)
    return step_of(script, mesh), mesh.device


def _autocast(job: Job, prepare: Callable[[nn.Module], None]) -> tuple[TrainStep, torch.device]:
    """Build a training with fp32 weights and bf16 products by autocast, as most people write it."""
    plain = _Plain(job, dtype=torch.float32)
    prepare(plain.model)
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


def _masters(job: Job, prepare: Callable[[nn.Module], None]) -> tuple[TrainStep, torch.device]:
    """Build a training with bf16 weights, and an fp32 copy for the optimizer, as scripts do."""
    plain = _Plain(job, dtype=torch.bfloat16)
    prepare(plain.model)
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


class _Plain:
    """The model file's own model, batch and optimizer on this process' device."""

    def __init__(self, job: Job, *, dtype: torch.dtype) -> None:
        self._file = load_model_file(job.spec, job.arguments)
        self.mesh: Mesh = start(pipeline=1, data=1, tensor=1)
        whole = initial_weights.build(self._file.build_model, seed=SEED)
        self.model = whole.to(self.mesh.device, dtype)
        drawn = synthetic_batches(
            self._file.example_batch, self.mesh, rows=(1, job.rows), seed=SEED
        )
        self._batch = to_device(next(drawn), self.mesh, torch.float32)
        self._keys = build(self._file, device="meta", dtype=None, batch_size=job.rows).step.keys
        self._dtype = dtype

    def loss(self) -> Tensor:
        """Return the loss of the step's rows."""
        taken = {k: self._as_taken(v) for k, v in self._batch.items() if k in self._keys}
        outputs = self.model(**taken)
        if self._file.loss is None:
            return loss_in(outputs)
        found: Tensor = in_float32(self._file.loss)(outputs, self._batch)
        return found

    def _as_taken(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the file's optimizer, or AdamW as scripts have it."""
        usual = partial(adamw, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        made: Optimizer = (self._file.build_optimizer or usual)(parameters)
        for group in made.param_groups:
            group["fused"] = True
        return made
