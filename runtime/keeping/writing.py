"""Turns the state of a training into a checkpoint: written beside its place, then put there.

A folder `step-N` is whole: it gets that name when all of its files are on the disk and described.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.keeping.exported import exported_of
from autopar.runtime.keeping.manifest import (
    NAME,
    Logical,
    Manifest,
    Moment,
    Origin,
    Stored,
    to_text,
)
from autopar.runtime.keeping.owners import Here, Owned, every_rank, owners
from autopar.runtime.keeping.places import MARK
from autopar.runtime.keeping.random_states import random_states
from autopar.runtime.keeping.safetensors_file import Entry, Written, in_file_order, write_tensors
from autopar.runtime.keeping.states import everything_held, scalars
from autopar.runtime.ranks.mesh import Mesh

STEP, UNFINISHED, BROKEN = "step-", ".tmp", ".broken"


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"{STEP}{step}"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


@torch.no_grad()
def write_checkpoint(
    folder: Path,
    moment: Moment,
    model: str,
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    built: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> str | None:
    """Write a checkpoint, each rank what it owns. Return why it could not be written, if so.

    `built` are the types that the constructor chose, for who exports weights from the checkpoint.
    """
    holdings = everything_held(parts, optimizer)
    owned = owners(holdings, mesh)
    place = step_folder(folder, moment.step)
    fresh = place.with_name(place.name + UNFINISHED)
    if (failure := _told_by_first(mesh, lambda: _make(fresh))) is not None:
        return failure
    logical = _logical(owned)
    own = _written_here(fresh, owned, logical, Here(holdings), mesh)
    ranks = every_rank((own, scalars(parts, optimizer)), mesh)
    failures = [one for one, _ in ranks if isinstance(one, str)]
    if failures:
        if mesh.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        return failures[0]
    manifest = Manifest(
        moment=moment,
        origin=Origin(
            torch=torch.__version__,
            model=model,
            plan=plan_digest(owned, mesh),
            degrees=_degrees(mesh),
        ),
        files={rank_file(rank): file for rank, (file, _) in enumerate(ranks)},
        tensors=logical,
        scalars={key: one for _, found in ranks for key, one in found.items()},
        exported=exported_of(parts, built, mesh),
    )
    return _told_by_first(mesh, lambda: _put_in_place(fresh, place, manifest))


def plan_digest(owned: Iterable[Owned], mesh: Mesh) -> str:
    """Return what stands for the places of the ranks and for what each of them holds."""
    axes = (mesh.pipeline.size, mesh.data.size, mesh.tensor.size)
    return hashlib.sha256(repr((axes, tuple(owned))).encode()).hexdigest()[:16]


def _degrees(mesh: Mesh) -> str:
    axes = (("pp", mesh.pipeline), ("dp", mesh.data), ("tp", mesh.tensor))
    return " · ".join(f"{name} {axis.size}" for name, axis in axes if axis.size > 1) or "one device"


def _logical(owned: Iterable[Owned]) -> dict[str, Logical]:
    by_key: defaultdict[str, list[Owned]] = defaultdict(list)
    for one in owned:
        by_key[one.key].append(one)
    return {
        key: Logical(
            dtype=found[0].dtype,
            shape=found[0].held.global_shape,
            shards=tuple(
                Stored(file=rank_file(one.rank), entry=f"{key}@{number}", chunks=one.chunks)
                for number, one in enumerate(found)
            ),
        )
        for key, found in by_key.items()
    }


def _written_here(
    fresh: Path,
    owned: Sequence[Owned],
    logical: Mapping[str, Logical],
    here: Here,
    mesh: Mesh,
) -> Written | str:
    """Write what this rank owns; return the file, or why it could not be written."""
    shards = [shard for one in logical.values() for shard in one.shards]
    mine = {
        shard.entry: one
        for shard, one in zip(shards, owned, strict=True)  # both in the order of keys
        if one.rank == mesh.rank
    }
    random = random_states(mesh.device)
    entries = in_file_order(
        [
            *(
                Entry(name=name, dtype=one.dtype, shape=one.chunks.local_shape)
                for name, one in mine.items()
            ),
            *(Entry(name=n, dtype=one.dtype, shape=tuple(one.shape)) for n, one in random.items()),
        ]
    )

    def tensors() -> Iterator[Tensor]:
        for entry in entries:
            own = mine.get(entry.name)
            yield random[entry.name] if own is None else here.tensor(own)

    try:
        return write_tensors(fresh / rank_file(mesh.rank), entries, tensors(), MARK)
    except OSError as error:
        return _said(error)


def _told_by_first(mesh: Mesh, act: Callable[[], None]) -> str | None:
    """Have the first rank do something, and return on all ranks why it could not."""
    failure = None
    if mesh.rank == 0:
        try:
            act()
        except OSError as error:
            failure = _said(error)
    told: str | None = every_rank(failure, mesh)[0]
    return told


def _said(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else f"{error.strerror}"


def _make(fresh: Path) -> None:
    if fresh.exists():  # of a run that was killed while it wrote
        shutil.rmtree(fresh)
    fresh.mkdir(parents=True)


def _put_in_place(fresh: Path, place: Path, manifest: Manifest) -> None:
    for name, written in manifest.files.items():
        file = fresh / name
        if not file.exists() or file.stat().st_size != written.size_bytes:
            raise OSError(
                0, "what other nodes wrote is not seen here, so it is no shared folder", name
            )
    with (fresh / NAME).open("w", encoding="utf-8") as file_of:
        file_of.write(to_text(manifest))
        file_of.flush()
        os.fsync(file_of.fileno())
    _settle(fresh)
    fresh.rename(place)
    _settle(place.parent)


def _settle(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
