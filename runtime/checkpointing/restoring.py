"""Restores the weights and states of a training from a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing.finding import Checkpoint, step_folder, verified
from autopar.runtime.checkpointing.manifest import Logical, Stored, rank_file
from autopar.runtime.checkpointing.owners import Slices, Stepped, named_tensors, overlaps, value_of
from autopar.runtime.checkpointing.states import (
    RANDOM,
    STATE,
    WEIGHT,
    Target,
    made_scalar,
    set_random_states,
    targets,
)
from autopar.runtime.optimizer.pieces import local_tensor
from autopar.runtime.ranks.leaving import say
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.shards import Chunks, whole
from autopar.runtime.weights.stored_tensors import open_tensors


class Reader:
    """Reads slices of logical tensors; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint, files: ExitStack) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self._opened: dict[str, Any] = {}

    def logical(self, key: str) -> Logical | None:
        """Return the entry of a logical tensor, or None if the checkpoint does not have it."""
        return self.checkpoint.manifest.tensors.get(key)

    def fill(self, key: str, held: Chunks, tensor: Tensor) -> None:
        """Fill a tensor that holds these chunks of a logical tensor."""
        for shard in self.checkpoint.manifest.tensors[key].shards:
            for target, source in overlaps(held, shard.chunks):
                found = self.box(shard, source)
                tensor[target] = found.to(tensor.device, tensor.dtype)

    def box(self, shard: Stored, place: Slices) -> Tensor:
        """Return a box of a shard; for a 0-dim tensor, the tensor."""
        found = self._file(shard.file).get_slice(shard.entry)
        box: Tensor = found[place] if place else found[...]
        return box

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            path = self.checkpoint.folder / name
            self._opened[name] = self._files.enter_context(open_tensors(path))
        return self._opened[name]


_MOST_SHOWN = 5


@torch.no_grad()
def restore(checkpoint: Checkpoint, parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Restore this rank's weights and optimizer states from a checkpoint."""
    _refuse_others(checkpoint, parts)
    with ExitStack() as files:
        reader = Reader(checkpoint, files)
        _restore_weights(reader, parts, optimizer)
        keys = _state_keys(checkpoint)
        for target in targets(parts, optimizer):
            for key in keys.get(target.name, ()):
                optimizer.state[target.parameter][key] = _restored_state(
                    reader, target, key, optimizer
                )


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
    stepped = Stepped(optimizer)
    for one in named_tensors(parts):
        tensor, key = one.place.tensor, WEIGHT + one.names[0]
        reader.fill(key, one.chunks, local_tensor(tensor.detach()))
        for piece in stepped.pieces(tensor) or ():
            if piece.target.dtype != piece.place.dtype:
                target = Target(name=key, parameter=piece.target, chunks=one.chunks, piece=piece)
                for part in target.parts(key, value_of(piece)):
                    reader.fill(key, part.chunks, part.tensor)


def _state_keys(checkpoint: Checkpoint) -> Mapping[str, list[str]]:
    """Return the keys of the saved optimizer states, by parameter."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.scalars):
        if name.startswith(STATE):
            key, _, parameter = name.removeprefix(STATE).partition("/")
            found[parameter].append(key)
    return found


def _restored_state(reader: Reader, target: Target, key: str, optimizer: Optimizer) -> Any:
    name = f"{STATE}{key}/{target.name}"
    logical = reader.logical(name)
    if logical is None:
        return made_scalar(reader.checkpoint.manifest.scalars[name], target, optimizer)
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
    """Restore this rank's weights from the checkpoint of the best step; note if it is broken."""
    place = step_folder(folder, best)
    found = verified(place, mesh)
    if isinstance(found, str):
        told = f"note: the weights of the last step are exported: {place} is not whole ({found})"
    else:
        restore(Checkpoint(place, found), parts, optimizer)
        told = f"the best evaluation was that of step {best:,}: its weights are exported"
    if mesh.rank == 0:
        say(told)
