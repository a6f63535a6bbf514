"""Takes a snapshot of a training, and writes it as a checkpoint."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing.finding import begin, put_in_place, remove, step_folder
from autopar.runtime.checkpointing.manifest import (
    CheckpointOrigin,
    ExportedWeight,
    Logical,
    Manifest,
    Moment,
    StoredShard,
    rank_file,
    to_text,
)
from autopar.runtime.checkpointing.owners import (
    LocalTensors,
    Owned,
    Owners,
    named_tensors,
    on_first,
)
from autopar.runtime.checkpointing.safetensors_file import (
    Entry,
    WrittenFile,
    in_file_order,
    refuse_unknown_types,
    write_tensors,
)
from autopar.runtime.checkpointing.states import local_parts, random_states, scalars
from autopar.runtime.ranks.locations import MARK, Location, size_of
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import every_rank


def exported_of(
    parts: Sequence[nn.Module], built: Mapping[str, torch.dtype], mesh: Mesh
) -> Mapping[str, ExportedWeight]:
    """Return the state dict entries of the whole model, from all ranks, by first names.

    A tied weight is stored under its first name, as in Hugging Face and safetensors files. `built`
    are the dtypes that the constructor chose.
    """
    here = [
        (one.names, built.get(one.names[0], one.place.tensor.dtype))
        for one in named_tensors(parts)
        if one.is_parameter or one.is_persistent
    ]
    found: dict[str, tuple[torch.dtype, set[str]]] = {}
    for names, dtype in (one for rank in every_rank(here, mesh.world) for one in rank):
        _, aliases = found.setdefault(names[0], (dtype, set()))
        aliases.update(names[1:])
    return {
        name: ExportedWeight(dtype=dtype, aliases=tuple(sorted(aliases)))
        for name, (dtype, aliases) in sorted(found.items())
    }


def export_dtype(trained: torch.dtype, built: torch.dtype) -> torch.dtype:
    """Return the dtype to export: the constructor's, except after a training in float64.

    Such a training is compared with another training to the last digit.
    """
    is_exact = trained is torch.float64
    return trained if is_exact or not built.is_floating_point else built


def tied_names(exported: Mapping[str, ExportedWeight]) -> Mapping[str, str]:
    """Map the other names of tied weights to the first name."""
    return {alias: name for name, one in exported.items() for alias in one.aliases}


_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSnapshot:
    """A checkpoint to be written: its manifest, and this rank's share."""

    fresh: Location  # the folder while files are written
    place: Location  # the folder once it is complete
    # without sizes and digests of files yet; only the first rank has the scalars
    manifest: Manifest
    own_file: str
    entries: Sequence[Entry]
    tensors: Sequence[Tensor]  # one per entry

    @property
    def step(self) -> int:
        """The step after which the snapshot was taken."""
        return self.manifest.moment.step

    def write(self) -> WrittenFile | str:
        """Write this rank's file, in any thread; return its size and digest, or the failure."""
        try:
            return write_tensors(self.fresh / self.own_file, self.entries, iter(self.tensors), MARK)
        except OSError as error:
            return said(error)


@torch.no_grad()
def snapshot(
    folder: Location,
    moment: Moment,
    model: str,
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    owners: Owners,
    *,
    exported: Mapping[str, ExportedWeight] = MappingProxyType({}),
) -> CheckpointSnapshot | str:
    """Take a snapshot to write to a new folder, or return why that is impossible.

    `exported` describes the model that an export from the checkpoint writes.
    """
    mesh = owners.mesh
    local_tensors = local_parts(parts, optimizer)
    owned = owners.of(local_tensors)
    place = step_folder(folder, moment.step)
    fresh = _result_of_first(mesh, lambda: begin(place))
    if isinstance(fresh, str):
        return fresh
    logical = _logical(owned)
    tensors = _share(owned, logical, LocalTensors(local_tensors), mesh)
    entries = in_file_order(
        Entry(name=name, dtype=one.dtype, shape=tuple(one.shape)) for name, one in tensors.items()
    )
    refuse_unknown_types(entries)
    manifest = Manifest(
        moment=moment,
        origin=CheckpointOrigin(
            torch=torch.__version__,
            model=model,
            plan=plan_digest(owned, mesh),
            degrees=_degrees(mesh),
        ),
        files={},
        tensors=logical,
        scalars={
            key: one
            for found in on_first(scalars(parts, optimizer), mesh)
            for key, one in found.items()
        },
        exported=exported,
    )
    return CheckpointSnapshot(
        fresh=fresh,
        place=place,
        manifest=manifest,
        own_file=rank_file(mesh.rank),
        entries=entries,
        tensors=[tensors[one.name] for one in entries],
    )


def complete(written: CheckpointSnapshot, own: WrittenFile | str, mesh: Mesh) -> str | None:
    """Give a checkpoint its final name after all ranks have written, or return why it failed."""
    ranks = every_rank(own, mesh.world)
    failures = [one for one in ranks if isinstance(one, str)]
    if failures:
        if mesh.rank == 0:
            remove(written.fresh)
        return failures[0]
    files = {rank_file(rank): file for rank, file in enumerate(ranks)}
    manifest = replace(written.manifest, files=files)
    return _result_of_first(
        mesh, lambda: _complete_on_first(written.fresh, written.place, manifest)
    )


def plan_digest(owned: Iterable[Owned], mesh: Mesh) -> str:
    """Return a digest of the mesh's degrees, and of which rank writes which shard."""
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
            shape=found[0].shard.global_shape,
            shards=tuple(
                StoredShard(
                    file=rank_file(one.rank), entry=f"{key}@{number}", ranges=one.chunks.ranges
                )
                for number, one in enumerate(found)
            ),
        )
        for key, found in by_key.items()
    }


def _share(
    owned: Sequence[Owned], logical: Mapping[str, Logical], here: LocalTensors, mesh: Mesh
) -> dict[str, Tensor]:
    """Return the tensors of this rank's file: the shards that it owns, and its random states."""
    shards = [shard for one in logical.values() for shard in one.shards]
    mine = {
        shard.entry: here.tensor(one)
        for shard, one in zip(shards, owned, strict=True)  # both are ordered by key
        if one.rank == mesh.rank
    }
    return mine | random_states(mesh.device)


def _result_of_first(mesh: Mesh, act: Callable[[], _Made]) -> _Made | str:
    """Run `act` on the first rank, and return its result or its error on all ranks."""
    made: _Made | str | None = None
    if mesh.rank == 0:
        try:
            made = act()
        except OSError as error:
            made = said(error)
    result: _Made | str = every_rank(made, mesh.world)[0]
    return result


def said(error: OSError) -> str:
    """Describe an OSError: what went wrong, and with which file."""
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what


def _complete_on_first(fresh: Location, place: Location, manifest: Manifest) -> None:
    for name, written in manifest.files.items():
        file = fresh / name
        if not file.exists() or size_of(file) != written.size_bytes:
            raise OSError(0, "what other nodes wrote is not there: the folder is not shared", name)
    put_in_place(fresh, place, to_text(manifest))
