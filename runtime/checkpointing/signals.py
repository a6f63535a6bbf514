"""Handles signals and collects garbage between steps, and profiles a step.

Python collects garbage after a certain number of allocations: at a different time on each rank, and
each time all other ranks wait. Here all ranks collect after the same step. Objects that exist
before the first step are frozen, so that they are not examined again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from socket import socket, socketpair
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from autopar.runtime.checkpointing.watch import place_of_main_thread
from autopar.runtime.ranks.leaving import FAILED, ExitReason, say, tell
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import PROFILES, Event, Metrics
from autopar.runtime.ranks.transport import every_rank

PREEMPTED = 75  # the exit code: a checkpoint has been written, and the training can be resumed
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
# schedulers signal torchrun and the ranks, and torchrun passes its signal on: a rank gets the same
# signal twice within this time
_SAME_SECONDS = 1.0
_CHECK_SECONDS = 1.0
_MOST_STEPS = 1000  # between two exchanges
_LAST_SECONDS = 20.0  # torchrun kills its ranks 30 s after the first signal


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """The ranks' common answer after a step. Steps without an exchange have the defaults."""

    stops: bool = False  # a signal asked some rank to stop
    is_written: bool = False  # no rank is still writing
    is_due: bool = False  # a checkpoint is due by the clock


class StopSignals:
    """Finds after each step whether a signal to some rank asks the training to stop.

    The ranks exchange their answers about once a second, or after each step if steps are longer: a
    message after every step of 10 ms would cost 3 %. Each exchange fixes the step of the next one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        self._checked_step: int | None = None
        self._checked_at = time.monotonic()
        self._steps_between = 1
        self._steps_ended = 0

    def listen(self) -> None:
        """Install the signal handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
            if "TORCHELASTIC_RUN_ID" in os.environ:
                self._end_with_torchrun()

    def ignore(self) -> None:
        """Ignore further signals: the process is about to exit."""
        self._steps_ended += 1
        for one in self._before:
            signal.signal(one, signal.SIG_IGN)

    def restore_handlers(self) -> None:
        """Restore the handlers that were installed before."""
        for one, handler in self._before.items():
            if handler is not None:  # None: the old handler was not installed by Python
                signal.signal(one, handler)
        self._before = {}

    def ask(self, step: int, *, is_writing: bool = False, is_due: bool = False) -> StepAnswer:
        """Return the ranks' common answer. All ranks call this after every step."""
        self._steps_ended += 1
        last = step - 1 if self._checked_step is None else self._checked_step
        if step < last + self._steps_between:
            return StepAnswer()
        now = time.monotonic()
        seconds = max(now - self._checked_at, 1e-6) / (step - last)
        own = min(max(int(_CHECK_SECONDS / seconds), 1), _MOST_STEPS)
        is_asked = self._asked_at is not None
        flags = [float(is_asked), float(is_writing), float(is_due), float(-own)]
        found = torch.tensor(flags, device=self._mesh.device)
        if self._mesh.world.size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._mesh.world.group)
        stops, writing, due, steps = found.tolist()
        self._checked_step, self._checked_at = step, time.monotonic()
        self._steps_between = int(-steps)
        return StepAnswer(stops=bool(stops), is_written=not writing, is_due=bool(due))

    def _end_with_torchrun(self) -> None:
        """Start a thread that ends the process if torchrun asks for it and no step ends in time.

        Python runs signal handlers between two bytecode instructions, so a main thread that waits
        for a device never runs one. Signals are therefore also written to a socket that a thread
        reads.
        """
        reader, writer = socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        # forked workers handle their own signals
        os.register_at_fork(after_in_child=_write_no_signals)
        threading.Thread(target=self._look, args=(reader, writer), daemon=True).start()

    def _look(self, reader: socket, _: socket) -> None:
        while number := reader.recv(1):
            ended = self._steps_ended
            if number[0] != signal.SIGTERM:
                continue
            time.sleep(_LAST_SECONDS)
            if self._before and self._steps_ended == ended:
                found = (
                    f"rank {self._mesh.rank} was asked to stop, and no step has ended for "
                    f"{_LAST_SECONDS:,.0f} s: it is {place_of_main_thread()}"
                )
                tell(ExitReason(FAILED, found, "--resume auto goes on from the last checkpoint"))
                os._exit(FAILED)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _write_no_signals() -> None:
    with suppress(ValueError):  # raised outside the main thread
        signal.set_wakeup_fd(-1)


EVERY_STEPS = 100


class Garbage:
    """Collects garbage: seldom, or after each step if reference cycles hold tensors."""

    def __init__(self) -> None:
        self._every, self._first_step = EVERY_STEPS, 0
        self._was_enabled = self._is_frozen = False

    def begin(self, step: int) -> None:
        """Collect, freeze what is left, and turn off automatic collection; `after` collects."""
        self._first_step, self._was_enabled = step + 1, gc.isenabled()
        gc.collect()
        self._is_frozen = gc.get_freeze_count() == 0  # otherwise other code has frozen objects
        if self._is_frozen:
            gc.freeze()
        gc.disable()

    def after(self, step: int) -> None:
        """Collect if it is due: after the same steps on all ranks, unless cycles hold tensors."""
        # not after the first step: its garbage is not typical
        if step == self._first_step + 1 and _free_tensors():
            # the model's code makes cycles with tensors: device memory matters more than time
            self._every = 1
        elif step % self._every == 0 or step == self._first_step:
            gc.collect(1)

    def end(self) -> None:
        """Turn automatic collection on again."""
        if self._was_enabled:
            gc.enable()
        if self._is_frozen:
            gc.unfreeze()
        self._was_enabled = self._is_frozen = False


def _free_tensors() -> bool:
    """Collect the two youngest generations; return whether a tensor of the youngest was freed."""
    young = [weakref.ref(one) for one in gc.get_objects(0) if isinstance(one, Tensor)]
    gc.collect(1)
    return any(one() is None for one in young)


_MESSAGES = ("nccl", "gloo", "c10d")  # substrings of the names of communication kernels
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSeconds:
    """The median times of the forwards and backwards of a part (a stage); None if it had none."""

    forward_seconds: float | None
    backward_seconds: float | None


@dataclass(frozen=True, slots=True)
class PartAction:
    """A forward ("F") or backward ("B") of a part, in seconds since the beginning of the step."""

    part: int  # among this rank's stages
    kind: str
    microbatch: int
    start_seconds: float
    end_seconds: float


class PartActions:
    """Notes when each part (stage) of this rank runs its forwards and backwards.

    A hook on each part sees its forward. A backward begins when a hook sees a gradient arrive at a
    tensor that the part returned, and ends when the autograd engine calls back. On a GPU the
    moments are events in its queue.
    """

    def __init__(self, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._is_cuda, self._counts = device.type == "cuda", [0] * len(parts)
        self.begun_ns = time.time_ns()  # since 1970, as the profiler counts
        self._begun, self._starts = self._now(), [self._now()] * len(parts)
        self._moments: list[tuple[int, str, int, Any, Any]] = []
        self._arrived: set[tuple[int, int]] = set()
        self._hooks: list[Any] = []
        for place, part in enumerate(parts):
            start, end = partial(self._start, place), partial(self._end, place)
            self._hooks.append(part.register_forward_pre_hook(start, prepend=True))
            self._hooks.append(part.register_forward_hook(end))

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _start(self, part: int, *_: Any) -> None:
        self._starts[part] = self._now()

    def _end(self, part: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        microbatch = self._counts[part]
        self._counts[part] += 1
        self._moments.append((part, "F", microbatch, self._starts[part], self._now()))
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.requires_grad:
                hook = partial(self._arrives, part, microbatch)
                one.register_hook(hook)  # type: ignore[no-untyped-call]

    def _arrives(self, part: int, microbatch: int, _gradient: Tensor) -> None:
        if (part, microbatch) not in self._arrived:
            self._arrived.add((part, microbatch))
            end = partial(self._end_backward, part, microbatch, self._now())
            Variable._execution_engine.queue_callback(end)

    def _end_backward(self, part: int, microbatch: int, start: Any) -> None:
        self._moments.append((part, "B", microbatch, start, self._now()))

    def found(self) -> tuple[PartAction, ...]:
        """Remove the hooks and return the actions; a GPU must have finished the step."""
        for one in self._hooks:
            one.remove()
        return tuple(
            PartAction(part, kind, microbatch, self._seconds(start), self._seconds(end))
            for part, kind, microbatch, start, end in self._moments
        )

    def _seconds(self, moment: Any) -> float:
        if self._is_cuda:
            return float(self._begun.elapsed_time(moment)) / 1e3
        return float(moment - self._begun)

    def medians(self, actions: Sequence[PartAction]) -> Iterator[PartSeconds]:
        """Yield the medians of each part."""
        for part in range(len(self._counts)):
            spans: dict[str, list[float]] = {"F": [], "B": []}
            for one in actions:
                if one.part == part:
                    spans[one.kind].append(one.end_seconds - one.start_seconds)
            forward, backward = (median(one) if one else None for one in spans.values())
            yield PartSeconds(forward_seconds=forward, backward_seconds=backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """The times and memory of one rank in the profiled step."""

    rank: int
    pipeline_rank: int
    step_seconds: float
    compute_seconds: float  # while at least one kernel ran, not counting communication
    memory_bytes: int | None  # peak reserved so far, on a GPU
    parts: tuple[PartSeconds, ...]


class StepProfile:
    """Runs the step of --profile-step under torch's profiler, on all ranks."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh, metrics: Metrics) -> None:
        self._step: int | None = None if mesh.is_dry_run else options.profile_step
        self._mesh, self._metrics = mesh, metrics
        self._profiler: Any = None
        self._begun = 0.0
        self._actions: PartActions | None = None
        self._metrics_file: Path | None = options.metrics

    def begin(self, step: int, parts: Sequence[nn.Module]) -> None:
        """Start the profiler if this is the step."""
        if self._step == step:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints its start and stop
            self._profiler = profile(activities=[_ACTIVITIES[self._mesh.device.type]])
            self._profiler.start()
            every_rank(None, self._mesh.world)  # no rank begins the step before all are profiling
            self._begun = time.perf_counter()
            self._actions = PartActions(parts, self._mesh.device)

    def end(self, step: int) -> None:
        """Stop the profiler and print the result if this was the step."""
        if self._step != step or self._profiler is None or self._actions is None:
            return
        is_cuda = self._mesh.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._begun
        self._profiler.stop()
        actions = self._actions.found()
        own = RankProfile(
            rank=self._mesh.rank,
            pipeline_rank=self._mesh.pipeline.rank,
            step_seconds=seconds,
            compute_seconds=covered_us(_computing(self._profiler.events())) / 1e6,
            memory_bytes=torch.cuda.max_memory_reserved() if is_cuda else None,
            parts=tuple(self._actions.medians(actions)),
        )
        ranks: list[RankProfile] = every_rank(own, self._mesh.world)
        self._metrics.add(event=Event.PROFILED, step=step, ranks=[asdict(one) for one in ranks])
        self._mesh.say(f"profiled step {step:,}: {_in_words(ranks)}")
        # of the ranks with the same stages, the first one writes
        if self._metrics_file is not None and self._mesh.data.rank == self._mesh.tensor.rank == 0:
            data = {"begun_ns": self._actions.begun_ns, "actions": [asdict(one) for one in actions]}
            self._write(self._metrics_file.resolve().parent / PROFILES / str(step), own, data)

    def _write(self, folder: Path, own: RankProfile, actions: dict[str, Any]) -> None:
        """Write this rank's actions, and the profiler's trace; a full disk ends no training."""
        named, text = {"pipeline_rank": own.pipeline_rank, **actions}, f"rank-{own.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{text}.json").write_text(json.dumps(named), encoding="utf-8")
            self._profiler.export_chrome_trace(str(folder / f"{text}.trace.json.gz"))
        except (OSError, RuntimeError) as error:
            say(f"note: the profile is not in {folder}: {error}")


def _computing(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Yield the spans of kernels other than communication; on a CPU, of ops."""
    for one in events:
        is_op = one.device_type.name == "CUDA" or one.name.startswith("aten::")
        if is_op and not any(word in one.name.lower() for word in _MESSAGES):
            yield one.time_range.start, one.time_range.end


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by spans, which may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _in_words(ranks: Iterable[RankProfile]) -> str:
    """Describe each pipeline rank by the medians of the ranks with this pipeline rank."""
    groups = groupby(
        sorted(ranks, key=lambda one: one.pipeline_rank), key=lambda one: one.pipeline_rank
    )
    words = []
    for pipeline_rank, found in groups:
        own = list(found)
        computing, whole = (
            median(getattr(one, name) for one in own) * 1e3
            for name in ("compute_seconds", "step_seconds")
        )
        words.append(f"pipeline rank {pipeline_rank} computes {computing:,.3g} of {whole:,.3g} ms")
    return ", ".join(words)
