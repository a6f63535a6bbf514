"""Runs a script as one rank, and saves its losses, tensors and random draws.

`torchrun … -m autopar.codegen.proof.script_rank SCRIPT JOB` writes files of each rank into the
job's folder. A rank whose script hangs longer than the job's patience prints where, and exits.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed._symmetric_memory import _test_mode
from torch.optim import Optimizer

from autopar.codegen.proof.comparison import (
    RankBlock,
    RankInHalf,
    RankTrained,
    SentMessage,
    SentMessages,
)
from autopar.codegen.proof.draws import DrawRecorder
from autopar.codegen.proof.exactness import (
    ExactMode,
    KeepFloat64,
    all_steps,
    all_tensors,
    clipped_share,
    failure_of,
    trained_tensors,
    wide_copy,
)
from autopar.codegen.proof.replicas import short_round
from autopar.runtime import optimizer
from autopar.runtime.checkpointing.owners import local_weights, named_tensors
from autopar.runtime.data_parallel.averaging import NOTHING
from autopar.runtime.optimizer import gradients
from autopar.runtime.optimizer.gradients import local_gradients
from autopar.runtime.optimizer.pieces import local_tensor
from autopar.runtime.tensor.shards import boxes, chunks_by_name, whole

NAME = "emitted_script"
_UNSEEDED = 2**52  # plus the rank: processes differ unless the script seeds them


class StepRecorder:
    """Records the steps of a rank's script: exact ones, and one that draws random numbers."""

    def __init__(self, steps: int, clip: Callable[..., Tensor], rank: int) -> None:
        self.steps, self.clip, self.step = steps, clip, 0
        self.drawing = DrawRecorder(_UNSEEDED + rank)
        self.limits: dict[int, float] = {}
        self.norms: list[float] = []
        self.parts: Sequence[nn.Module] = ()
        self.initial: list[RankBlock] = []
        self.gradients: list[RankBlock] = []
        self.parameters: list[RankBlock] = []

    def clipped(self, parts: Sequence[nn.Module], limit: float, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients to a share of their norm, not to `limit`; copy those of the first step."""
        norm = self.clip(parts, math.inf, *args, **kwargs)
        if limit:
            share = clipped_share(self.step)
            self.clip(parts, float(norm) * share, *args, **kwargs)
        if self.step <= self.steps:
            self.norms.append(float(norm))
            self.limits[self.step] = limit
        if not self.gradients:
            self.gradients = [block for part in parts for block in _gradients(part)]
        return norm

    def stepped(self, step: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
        """Return a step function that computes exactly, and records the draws of the last step."""

        def watched(model: Any, *args: Any, **kwargs: Any) -> Tensor:
            self.step += 1
            if self.step == 1:
                self.parts = parts_of(model)
                self.initial = [block for part in self.parts for block in _initial(part)]
            if self.step <= self.steps:
                with ExactMode(dtype):
                    return step(model, *args, **kwargs)
            self.parameters = [block for part in self.parts for block in _parameters(part)]
            with self.drawing, KeepFloat64(dtype):
                return step(model, *args, **kwargs)

        return watched

    def faults(self, limit: float | None) -> tuple[str, ...]:
        """Return faults in the clipping of the steps; `limit` is the script's setting."""
        if not self.limits:
            return ("gradients are never clipped",)
        missing = [step for step in range(1, self.steps + 1) if step not in self.limits]
        others = [found for found in self.limits.values() if (found or 0) != (limit or 0)]
        faults = [f"gradients are not clipped in step {step}" for step in missing[:1]]
        faults += [f"gradients are clipped at {one:g}, CLIP_NORM is {limit}" for one in others[:1]]
        return tuple(faults)


def run_script(
    path: str,
    arguments: Sequence[str],
    *,
    limit: float | None = 1.0,
    compresses: bool = True,
    counts_messages: bool = False,
) -> RankTrained:
    """Run a script's main; `limit` is its setting of the clipping norm.

    If `compresses` is false, gradients are sent whole, whatever the script's setting is. With
    `counts_messages`, inductor says which messages of compiled layers it can fuse with products.
    """
    rank = int(os.environ.get("RANK", "0"))
    steps = int(dict(pairwise(arguments))["--steps"])
    watched = StepRecorder(steps, gradients.clip_by_global_norm, rank)
    with (  # a script may import it from the package or from its module
        patch.object(optimizer, "clip_by_global_norm", watched.clipped),
        patch.object(gradients, "clip_by_global_norm", watched.clipped),
    ):
        script: Any = imported(Path(path))
    if hasattr(script, "SYNC_EVERY"):
        own = getattr(script, "OUTER_PARTS", 1), getattr(script, "OUTER_DELAY", 0)
        script.SYNC_EVERY, script.OUTER_DELAY = short_round(*own)
    if not compresses:
        script.COMPRESS = NOTHING
    dtype = getattr(torch, dict(pairwise(arguments)).get("--dtype", script.DTYPE))
    script.train_step = watched.stepped(script.train_step, dtype)
    if hasattr(script, "valid_targets"):  # absent if the loss has no targets to count
        script.valid_targets = _exactly(script.valid_targets, dtype)
    torch.manual_seed(_UNSEEDED + rank)
    counting: AbstractContextManager[dict[SentMessages, None]] = (
        _counted_messages(path) if counts_messages else nullcontext({})
    )
    with counting as messages:
        parts, losses = script.main([*arguments, "--steps", str(all_steps(steps))])
    return RankTrained(
        losses=tuple(losses[:steps]),
        norms=tuple(watched.norms),
        initial=tuple(watched.initial),
        gradients=tuple(watched.gradients),
        parameters=tuple(watched.parameters),
        draws=watched.drawing.draws(parts),
        faults=watched.faults(limit),
        messages=tuple(messages),
    )


def _line_in(path: str, trace: str) -> int:
    """Return the innermost line of a script in a printed stack trace, or 0."""
    found = re.findall(r'File "(.+)", line (\d+)', trace)
    return next((int(line) for file, line in reversed(found) if file == path), 0)


@contextmanager
def _counted_messages(path: str) -> Iterator[dict[SentMessages, None]]:
    """Collect the messages in each graph that inductor compiles, and whether it could fuse them.

    inductor fuses them on GPUs only, so its pass runs on a copy of each graph, with that check off.
    """
    from torch._inductor.fx_passes.micro_pipeline_tp import _is_backward, micro_pipeline_tp_pass

    found: dict[SentMessages, None] = {}
    functional = torch.ops._c10d_functional
    words = {
        functional.all_gather_into_tensor.default: "gather",
        functional.reduce_scatter_tensor.default: "sum",
    }

    def look(graph: fx.Graph) -> None:
        sent = [one for one in graph.nodes if one.target in words]
        copied = deepcopy(graph)
        with _test_mode(), patch.object(dist, "is_nccl_available", lambda: True):
            micro_pipeline_tp_pass(copied)
        left = {one.name for one in copied.nodes}
        messages = (
            SentMessage(
                what=words[one.target],
                is_backward=_is_backward(graph),
                is_fused=one.name not in left,
                line=_line_in(path, one.meta.get("stack_trace") or ""),
            )
            for one in sent
        )
        found[tuple(messages)] = None

    with torch._inductor.config.patch(post_grad_custom_post_pass=look):
        yield found


def run_as_it_is(path: str, arguments: Sequence[str]) -> RankInHalf:
    """Run a script's main unchanged, except that its steps draw no random numbers."""
    script: Any = imported(Path(path))
    step, found = script.train_step, RankInHalf()
    dtype = getattr(torch, dict(pairwise(arguments)).get("--dtype", script.DTYPE))
    optimizers: list[Optimizer] = []

    def watched(model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        if not optimizers:
            optimizers.append(optimizer)
            found.initial = _weights(parts_of(model), optimizer)
            found.types = dict(_types_of_buffers(parts_of(model)))
        with ExactMode(dtype):
            loss: Tensor = step(model, optimizer, *args, **kwargs)
            return loss

    script.train_step = watched
    parts, losses = script.main(arguments)
    found.losses, found.final = tuple(losses), _weights(parts, optimizers[0])
    return found


def parts_of(model: Any) -> Sequence[nn.Module]:
    """Return a rank's modules: the model, or its pipeline stages."""
    return [model] if isinstance(model, nn.Module) else model.parts


def _weights(parts: Sequence[nn.Module], optimizer: Optimizer) -> list[RankBlock]:
    """Return buffers, and parameters (fp32 masters if the optimizer has them)."""
    weights = local_weights(parts, optimizer)
    return [RankBlock(one.key, one.chunks, wide_copy(one.tensor)) for one in weights]


def _types_of_buffers(parts: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    for one in named_tensors(parts):
        if not one.is_parameter:
            yield one.names[0], str(one.place.tensor.dtype).removeprefix("torch.")


def _exactly(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def exact(*args: Any) -> Tensor:
        with ExactMode(dtype):
            return function(*args)

    return exact


def imported(path: Path) -> ModuleType:
    """Import a script by path, with evaluation and export turned off.

    The script is compiled here, because Python's cache of compiled files only notices changes of
    size or second, and a script may be written twice in a second.
    """
    module = ModuleType(NAME)
    module.__file__ = str(path)
    sys.modules[NAME] = module
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    module.CHECK_FIRST_STEP = False  # type: ignore[attr-defined]
    module.EXPORT = "none"  # type: ignore[attr-defined]
    module.EVAL_EVERY = 0  # type: ignore[attr-defined]
    return module


def _initial(part: nn.Module) -> Iterator[RankBlock]:
    chunks = chunks_by_name(part)
    for name, tensor in all_tensors(part).items():
        chunked = chunks.get(name) or whole(tuple(tensor.shape))
        yield RankBlock(name, chunked, wide_copy(local_tensor(tensor)))


def _parameters(part: nn.Module) -> Iterator[RankBlock]:
    chunks = chunks_by_name(part)
    for name, tensor in trained_tensors(part):
        yield RankBlock(name, chunks[name], wide_copy(local_tensor(tensor)))


def _gradients(part: nn.Module) -> Iterator[RankBlock]:
    """Yield gradients under all names of their parameters; in ZeRO-1 the parts of this rank."""
    chunks, names = chunks_by_name(part), defaultdict[int, list[str]](list)
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for one in local_gradients([part]):
        for name in names[id(one.parameter)]:
            if one.span is None:
                yield RankBlock(name, chunks[name], wide_copy(one.value))
                continue
            first = 0
            for box in boxes(tuple(one.parameter.shape), one.span.start, one.span.stop):
                chunked = chunks[name].within_box(box)
                last = first + math.prod(chunked.local_shape)
                values = one.value[first:last].view(chunked.local_shape)
                yield RankBlock(name, chunked, wide_copy(values))
                first = last


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The trainings that each rank of a script runs, one after another."""

    folder: Path  # for a rank's results
    patience_seconds: float  # how long a script may hang
    clip_norm: float | None
    exact: Sequence[str]  # arguments of the float64 training
    compresses: bool = True  # whether it compresses gradients, if the script does
    counts_messages: bool = False  # whether it records which messages inductor can fuse
    in_half: Sequence[str] = ()  # arguments of the 16-bit training, if there is one

    def left(self, kind: str, rank: int) -> Path:
        """Return the path of a rank's results of one training."""
        return self.folder / f"{kind}-{rank}.pickle"


def main(script: str, job_file: str) -> None:
    """Run a job's trainings of a script as this torchrun rank, each in a fresh fork."""
    job: Job = pickle.loads(Path(job_file).read_bytes())
    exact = partial(
        run_script,
        script,
        job.exact,
        limit=job.clip_norm,
        compresses=job.compresses,
        counts_messages=job.counts_messages,
    )
    _run_in_new_process(exact, job, "exact")
    if job.in_half:
        _run_in_new_process(partial(run_as_it_is, script, job.in_half), job, "half")


def trained_by_script(
    script: Path, ranks: int, job: Job, settings: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Run a job's trainings with torchrun, on CPUs; return each rank's results of each."""
    job_file = job.folder / "job.pickle"
    job_file.write_bytes(pickle.dumps(job))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    module = ["-m", "autopar.codegen.proof.script_rank", str(script), str(job_file)]
    command = [sys.executable, *torchrun, *module]
    ours = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **ours, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure_of(done.stderr, ranks, script)
    kinds = ("exact", "half") if job.in_half else ("exact",)
    return {
        kind: [pickle.loads(job.left(kind, rank).read_bytes()) for rank in range(ranks)]
        for kind in kinds
    }


def _run_in_new_process(run: Callable[[], Any], job: Job, kind: str) -> None:
    """Run a training in a new process, so that trainings do not share state of the model file."""

    def run_and_save() -> None:
        faulthandler.dump_traceback_later(job.patience_seconds, exit=True)
        found = run()
        faulthandler.cancel_dump_traceback_later()
        job.left(kind, int(os.environ["RANK"])).write_bytes(pickle.dumps(found))

    process = get_context("fork").Process(target=run_and_save)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode if process.exitcode > 0 else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
