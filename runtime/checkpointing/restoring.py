"""Restores a training from a checkpoint, writes checkpoints in threads, and records evaluations."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopar.runtime.checkpointing.finding import (
    Checkpoint,
    best_of,
    checkpoints_in,
    step_folder,
    step_of,
    verified,
)
from autopar.runtime.checkpointing.manifest import Logical, StoredShard, rank_file
from autopar.runtime.checkpointing.owners import (
    Slices,
    named_tensors,
    overlaps,
    parts_of,
    stepped_tensors,
)
from autopar.runtime.checkpointing.safetensors_file import HostRoom, WrittenFile
from autopar.runtime.checkpointing.states import (
    GROUP,
    RANDOM,
    REPLICA,
    STATE,
    WEIGHT,
    SteppedTensor,
    group_of,
    made_scalar,
    restore_errors,
    set_random_states,
    targets,
)
from autopar.runtime.checkpointing.writing import CheckpointSnapshot, complete
from autopar.runtime.evaluation.evaluating import Evaluated
from autopar.runtime.optimizer.outer import MOMENTUM, outer_of
from autopar.runtime.optimizer.pieces import is_copy, local_tensor, put_setting, value_of
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Event, Metrics
from autopar.runtime.ranks.transport import every_rank
from autopar.runtime.tensor.shards import Chunks, whole
from autopar.runtime.weights.stored_tensors import open_tensors


class Reader:
    """Reads slices of a checkpoint's logical tensors; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint, files: ExitStack) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self._opened: dict[str, Any] = {}

    def fill(self, key: str, held: Chunks, tensor: Tensor) -> None:
        """Fill a tensor that holds these chunks of a logical tensor."""
        for shard in self.checkpoint.manifest.tensors[key].shards:
            for target, source in overlaps(held.ranges, shard.ranges):
                found = self.box(shard, source)
                tensor[target] = found.to(tensor.device, tensor.dtype)

    @property
    def keys(self) -> Mapping[str, Logical]:
        """The keys of all logical tensors."""
        return self.checkpoint.manifest.tensors

    def box(self, shard: StoredShard, place: Slices) -> Tensor:
        """Read the slices `place` of a shard, or all of it if `place` is empty (a 0-dim tensor)."""
        found = self._file(shard.file).get_slice(shard.entry)
        box: Tensor = found[place] if place else found[...]
        return box

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            path = self.checkpoint.folder / name
            self._opened[name] = self._files.enter_context(open_tensors(path))
        return self._opened[name]


def step_again(scheduler: LRScheduler, count: int) -> None:
    """Advance a new scheduler by `count` steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(count):
            scheduler.step()


_MOST_SHOWN = 5


@torch.no_grad()
def restore(checkpoint: Checkpoint, parts: Sequence[nn.Module], optimizer: Optimizer) -> str | None:
    """Restore this rank's weights and states from a checkpoint; return a note for the user."""
    _refuse_others(checkpoint, parts)
    outer = outer_of(optimizer)
    with ExitStack() as files:
        reader = Reader(checkpoint, files)
        _restore_weights(reader, parts, optimizer)
        keys = _state_keys(checkpoint)
        for target in targets(parts, optimizer):
            for key, stored in keys.get(target.name, {}).items():
                restored = _restored_state(reader, target, stored, optimizer)
                if key.startswith(GROUP):
                    group = group_of(target, optimizer)
                    put_setting(optimizer, group, key.removeprefix(GROUP), restored)
                elif key != MOMENTUM:
                    optimizer.state[target.parameter][key] = restored
                elif outer is not None:
                    outer.put_momentum(target.parameter, restored)
        note = restore_errors(reader, parts)
    if outer is not None:
        outer.begin()
    return note


def note_of_replicas(checkpoint: Checkpoint, optimizer: Optimizer) -> str | None:
    """Return a note if a checkpoint has the states of another number of replicas."""
    outer, keys = outer_of(optimizer), _state_keys(checkpoint).values()
    stored = max((len(names) for one in keys for names in one.values()), default=1)
    here = 1 if outer is None else outer.replica.size
    if stored == here:
        return None
    is_dropped = outer is None and any(MOMENTUM in one for one in keys)
    of = f"{stored} replica{'s' * (stored > 1)}, and the plan has {here}: all begin with their mean"
    return f"the checkpoint has optimizer states of {of}{', without momentum' * is_dropped}"


def restore_random_states(checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Restore the random states that the same rank of the same plan saved."""
    path = checkpoint.folder / rank_file(mesh.rank)
    try:
        with open_tensors(path) as file:
            names = [name for name in file.keys() if name.startswith(RANDOM)]  # noqa: SIM118
            states = {name: file.get_tensor(name) for name in names}
        set_random_states(states, mesh.device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        refuse(
            f"{path} has no states of random generators: {type(error).__name__}: {error}",
            fix="go on from another checkpoint",
        )


def _refuse_others(checkpoint: Checkpoint, parts: Iterable[nn.Module]) -> None:
    """Exit if a checkpoint is of another model."""
    stored = checkpoint.manifest.tensors
    wrong = []
    for one in named_tensors(parts):
        found, name = stored.get(WEIGHT + one.names[0]), one.names[0]
        if found is None:
            wrong.append(f"it has no {name}")
        elif found.shape != one.chunks.global_shape:
            wrong.append(f"{name} is {list(found.shape)}, not {list(one.chunks.global_shape)}")
    if wrong:
        told = "; ".join(wrong[:_MOST_SHOWN]) + (" …" if len(wrong) > _MOST_SHOWN else "")
        refuse(
            f"the checkpoint {checkpoint.folder} is of another model: {told}",
            fix="go on with its model file, or begin anew in another --checkpoint folder",
        )


def _restore_weights(reader: Reader, parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Restore parameters, buffers, and the optimizer's fp32 copies."""
    for one, pieces in stepped_tensors(parts, optimizer):
        tensor, key = one.place.tensor, WEIGHT + one.names[0]
        reader.fill(key, one.chunks, local_tensor(tensor.detach()))
        for piece in pieces or ():
            if is_copy(piece):
                for part in parts_of(piece, key, one.chunks, value_of(piece)):
                    reader.fill(key, part.chunks, part.tensor)


def _state_keys(checkpoint: Checkpoint) -> Mapping[str, dict[str, list[str]]]:
    """Return the saved optimizer states by parameter and key: their names, one for each replica."""
    found: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.scalars):
        if name.startswith(STATE):
            key, _, parameter = name.removeprefix(STATE).partition("/")
            found[parameter].setdefault(key.partition(REPLICA)[0], []).append(name)
    return found


def _restored_state(
    reader: Reader, target: SteppedTensor, names: Sequence[str], optimizer: Optimizer
) -> Any:
    """Return the state of this rank's replica, or the mean of all if their number differs."""
    outer = outer_of(optimizer)
    if names[0] not in reader.keys:
        return made_scalar(reader.checkpoint.manifest.scalars[names[0]], target, optimizer)
    if outer is not None and outer.replica.size == len(names):
        names = [one for one in names if f"{REPLICA}{outer.replica.rank}/" in one]
    values = [_read_state(reader, target, one) for one in names]
    return values[0] if len(values) == 1 else torch.stack(values).mean(0)


def _read_state(reader: Reader, target: SteppedTensor, name: str) -> Tensor:
    logical = reader.keys[name]
    device = target.parameter.device
    if logical.shape != target.chunks.global_shape:
        value = torch.empty(logical.shape, dtype=logical.dtype, device=device)
        reader.fill(name, whole(logical.shape), value)
        return value
    value = torch.empty_like(target.parameter, dtype=logical.dtype, requires_grad=False)
    for part in target.parts(name, value):
        reader.fill(name, part.chunks, part.tensor)
    return value.detach()


def go_back(
    folder: Location, best: int, parts: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh
) -> None:
    """Restore weights and states from the best step's checkpoint, unless that is damaged."""
    place = step_folder(folder, best)
    found = verified(place, mesh)
    if isinstance(found, str):
        told = f"note: the weights of the last step are exported: {place} is not whole ({found})"
    else:
        restore(Checkpoint(place, found), parts, optimizer)
        told = f"the best evaluation was that of step {best:,}: its weights are exported"
    mesh.say(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A finished checkpoint, or the reason why it failed."""

    step: int
    failure: str | None
    seconds: float  # from the step's end until the checkpoint was in place
    waited_seconds: float  # the part of `seconds` in which the training stood still


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    taken: CheckpointSnapshot
    file: Future[WrittenFile | str]
    begun: float
    waited_seconds: float


class CheckpointSaving:
    """The checkpoint that is being written; there is at most one.

    On each rank a thread writes the rank's file. The thread sends no messages, because this would
    need further process groups. The ranks exchange messages between two steps.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._room = mesh, HostRoom()
        self._one: _UnderWay | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._one is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._one is not None and not self._one.file.done()

    def begin(self, taken: CheckpointSnapshot, begun: float) -> None:
        """Copy this rank's share and write it in a thread; the training has waited since `begun`.

        A rank without host memory for the copy writes before this returns, unnoticed by the others.
        """
        file: Future[WrittenFile | str] = Future()
        try:
            taken = replace(taken, tensors=self._room.copied(taken.tensors))
        except (MemoryError, RuntimeError):
            _write(taken, file)
        else:  # a daemon, so that an exit after an error does not wait for it
            threading.Thread(target=_write, args=(taken, file), daemon=True).start()
        waited = time.perf_counter() - begun
        self._one = _UnderWay(taken=taken, file=file, begun=begun, waited_seconds=waited)

    def finish(self) -> SavedCheckpoint:
        """Wait until all ranks have written, and put the checkpoint in place."""
        assert self._one is not None
        one, self._one, resumed = self._one, None, time.perf_counter()
        failure = complete(one.taken, one.file.result(), self._mesh)
        now = time.perf_counter()
        return SavedCheckpoint(
            step=one.taken.step,
            failure=failure,
            seconds=now - one.begun,
            waited_seconds=one.waited_seconds + now - resumed,
        )

    def write_at_once(self, taken: CheckpointSnapshot, begun: float) -> SavedCheckpoint:
        """Write a checkpoint while the training waits, without a copy."""
        failure = complete(taken, taken.write(), self._mesh)
        seconds = time.perf_counter() - begun
        return SavedCheckpoint(
            step=taken.step, failure=failure, seconds=seconds, waited_seconds=seconds
        )


def _write(taken: CheckpointSnapshot, file: Future[WrittenFile | str]) -> None:
    try:
        file.set_result(taken.write())
    except BaseException as error:  # the main thread raises it
        file.set_exception(error)


class Evaluations:
    """The evaluations of a training so far; the same on all ranks."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh, metrics: Metrics) -> None:
        self._options, self._mesh, self._metrics = options, mesh, metrics
        self._last: tuple[int, float] | None = None  # step and loss of the last one
        self._best: tuple[int, float] | None = None
        self._since = 0  # number of evaluations since the best one

    def go_on(self, folder: Location, step: int) -> None:
        """Resume after a step; the best evaluation is the best among the checkpoints up to it."""
        there = checkpoints_in(folder) if self._mesh.rank == 0 else ()
        before = [one for one in there if step_of(one) <= step]
        self._best = every_rank(best_of(before), self._mesh.world)[0]
        if self._best is not None and self._options.eval_every:
            every = self._options.eval_every
            self._since = step // every - self._best[0] // every

    def note(self, step: int, found: Evaluated) -> None:
        """Record an evaluation. A loss that is not finite is never the best."""
        self._last = step, found.loss
        is_best = math.isfinite(found.loss) and (self._best is None or found.loss < self._best[1])
        self._since = 0 if is_best else self._since + 1
        self._best = self._last if is_best else self._best
        data = {
            "event": Event.EVALUATED,
            "step": step,
            "loss": found.loss,
            "metrics": found.metrics,
            "rows": found.rows,
            "seconds": round(found.seconds, 3),
            "is_best": is_best,
        }
        self._metrics.add(**data)
        figures = (
            f"step {step:>6}   evaluation loss {found.loss:.5f}",
            *(f"{name} {value:.5g}" for name, value in found.metrics.items()),
            f"{found.rows:,} rows   {found.seconds:,.1f} s",
            *(["best"] if is_best else []),
        )
        line = json.dumps(data) if self._options.json else "   ".join(figures)
        self._mesh.say(line, sys.stdout)
        if self.are_over:
            best = self.best_step
            self._metrics.add(event=Event.STOPPED_EARLY, step=step, best_step=best)
            why = "found a number" if best is None else f"was better than that of step {best:,}"
            self._mesh.say(f"stopped early after step {step:,}: no evaluation {why}")

    def loss_of(self, step: int) -> float | None:
        """Return the finite loss of the evaluation after a step, or None."""
        if self._last is None or self._last[0] != step or not math.isfinite(self._last[1]):
            return None
        return self._last[1]

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, or None before there is one."""
        return None if self._best is None else self._best[0]

    @property
    def are_over(self) -> bool:
        """Whether --early-stop evaluations in a row brought no improvement."""
        most = self._options.early_stop
        return most is not None and self._since >= most
