"""Writes the weights that the ranks hold as .safetensors files of the user's whole model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing.manifest import ExportedWeight
from autopar.runtime.checkpointing.model_files import (
    EXPORT_MARK,
    Destination,
    ModelFiles,
    WeightsFile,
    files_of_model,
    place_and_size,
    refuse_foreign,
    write_model,
)
from autopar.runtime.checkpointing.owners import (
    LocalTensors,
    Owned,
    Owners,
    local_weights,
    overlaps,
)
from autopar.runtime.checkpointing.safetensors_file import Entry, as_bytes, in_file_order
from autopar.runtime.checkpointing.writing import export_dtype, exported_of, tied_names
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.ranks.leaving import refuse, say
from autopar.runtime.ranks.locations import MARK
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import every_rank, near
from autopar.runtime.tensor.shards import whole
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.loading import WeightsOrigin
from autopar.runtime.weights.saved_form import SavedFile, SavedForm, SavedTensor, UnsavableError

_INDEX = ".safetensors.index.json"


class SavedModel:
    """The tensors of an export in the form of `save_pretrained`.

    Tensors that are computed from a common weight are made together. `weight_of` returns a weight
    of the training; it is called once for each name in `weights`, in that order.
    """

    def __init__(self, form: SavedForm, weight_of: Callable[[str], Tensor]) -> None:
        self._form, self._weight_of = form, weight_of
        self._groups = tuple(_groups(form.tensors))
        self._number = {
            (one.file, one.name): number
            for number, group in enumerate(self._groups)
            for one in group
        }
        self._made: dict[tuple[str, str], Tensor] = {}
        indices = {name: one for name, one in form.others.items() if name.endswith(_INDEX)}
        self.files = ModelFiles(
            weights=tuple(map(self._file, form.files)),
            indices={name: _marked(one) for name, one in indices.items()},
            others={name: one for name, one in form.others.items() if name not in indices},
        )

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the weights that the export needs, in the order of their use."""
        numbers = dict.fromkeys(
            self._number[file.name, one.name] for file in self.files.weights for one in file.entries
        )
        return tuple(name for number in numbers for name in _sources(self._groups[number]))

    def tensor_of(self, file: WeightsFile, entry: Entry) -> Tensor:
        """Return a tensor of a file. Each can be asked for only once."""
        key = file.name, entry.name
        if key not in self._made:
            group = self._groups[self._number[key]]
            weights = {name: self._weight_of(name) for name in _sources(group)}
            made = self._form.made(group, weights)
            self._made |= {(one.file, one.name): own for one, own in zip(group, made, strict=True)}
        return self._made.pop(key)

    def _file(self, file: SavedFile) -> WeightsFile:
        """Return a file with its tensors ordered by the width of their dtypes, then by group."""
        tensors = sorted(
            file.tensors,
            key=lambda one: (-one.value.dtype.itemsize, self._number[one.file, one.name], one.name),
        )
        return WeightsFile(
            name=file.name,
            entries=tuple(
                Entry(name=one.name, dtype=one.value.dtype, shape=one.value.size) for one in tensors
            ),
            metadata={**file.metadata, **EXPORT_MARK},
        )


def _groups(tensors: Iterable[SavedTensor]) -> Iterable[tuple[SavedTensor, ...]]:
    """Split tensors into groups that share no source weight."""
    every: dict[int, list[SavedTensor]] = {}
    of_source: dict[str, list[SavedTensor]] = {}
    for one in tensors:
        joined = {id(of_source[name]): of_source[name] for name in one.sources if name in of_source}
        group = [*(tensor for other in joined.values() for tensor in other), one]
        for key in joined:
            del every[key]
        every[id(group)] = group
        of_source |= {name: group for tensor in group for name in tensor.sources}
    return map(tuple, every.values())


def _sources(group: Iterable[SavedTensor]) -> tuple[str, ...]:
    return tuple(sorted({name for one in group for name in one.sources}))


def _marked(index: bytes) -> str:
    """Return the JSON of an index, marked as written by autopar."""
    said = json.loads(index)
    metadata: Mapping[str, object] = said.get("metadata", {})
    return f"{json.dumps({**said, 'metadata': {**metadata, **MARK}}, indent=2)}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporting:
    """The destination of the trained weights, and the files that `save_pretrained` would write."""

    place: Destination
    form: SavedForm | None  # None: each weight is written under its name in the model


def exporting(place: Destination | None, recipe: Recipe, mesh: Mesh) -> Exporting | None:
    """Return the destination and form of the export before training begins; None without export."""
    if place is None:
        return None
    form = _form(recipe) if place.is_folder and mesh.rank == 0 else None
    if form is not None:
        refuse_foreign(place, [one.name for one in form.files])
    return Exporting(place=place, form=form)


def _form(recipe: Recipe) -> SavedForm | None:
    try:
        return recipe.saved_form()
    except UnsavableError as error:
        say(f"note: {error}, so --export writes the weights under their names in the model")
        return None


@torch.no_grad()
def export(
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    begun: WeightsOrigin,
    to: Exporting | None,
    mesh: Mesh,
) -> None:
    """Write the weights of the whole model.

    The first rank writes. It receives one tensor at a time, so no rank ever holds the whole model.
    Each weight has the dtype that the constructor gave it. A model built in fp32 and trained in 16
    bits is exported from the optimizer's fp32 copies; its frozen weights keep their initial values.
    """
    if to is None:
        return
    exported = exported_of(parts, begun.recipe.dtypes, mesh)
    local_tensors = [one for one in local_weights(parts, optimizer) if one.key in exported]
    whole_model = _Whole(
        Owners(mesh).of(local_tensors), LocalTensors(local_tensors), exported, begun, mesh
    )
    try:
        _write(whole_model, to, exported, mesh)
    except OSError as error:
        refuse(
            f"the trained weights cannot be written to {to.place.path}: {error.strerror}",
            fix="make room there, or --export another place; what --checkpoint keeps is unharmed",
        )


def _write(
    whole_model: _Whole, to: Exporting, exported: Mapping[str, ExportedWeight], mesh: Mesh
) -> None:
    """Write the files on the first rank; the other ranks send it the tensors."""
    saved = SavedModel(to.form, whole_model.gathered) if to.form is not None else None
    entries = whole_model.entries
    wanted = saved.weights if saved is not None else tuple(one.name for one in entries)
    # all ranks use the first rank's list, because only the first knows the files of the export
    (wanted, *_) = every_rank(wanted, mesh.world)
    if mesh.rank != 0:
        for name in wanted:
            whole_model.gathered(name)
        return
    if saved is None:
        files = files_of_model(to.place, entries, tied_names(exported))
        write_model(to.place, files, whole_model.tensor_of)
    else:
        files = saved.files
        write_model(to.place, files, saved.tensor_of)
    say(f"the trained weights are {place_and_size(to.place, files)}")
    if whole_model.rounded:
        say(_note_rounded(whole_model.rounded))


class _Whole:
    """The tensors of the whole model. The first rank receives them one by one."""

    def __init__(
        self,
        owned: Sequence[Owned],
        here: LocalTensors,
        exported: Mapping[str, ExportedWeight],
        begun: WeightsOrigin,
        mesh: Mesh,
    ) -> None:
        self.rounded: list[str] = []  # names of weights that exist only rounded to 16 bits
        self._owned = {key: list(own) for key, own in groupby(owned, key=lambda one: one.key)}
        self._here, self._exported = here, exported
        self._begun, self._mesh = begun, mesh

    @property
    def entries(self) -> list[Entry]:
        """Return the entries of the files, in the same order under every plan."""
        return in_file_order(
            Entry(name=key, dtype=self._dtype(own[0]), shape=own[0].shard.global_shape)
            for key, own in self._owned.items()
        )

    def gathered(self, name: str) -> Tensor:
        """Return a whole tensor on the first rank. Other ranks send shards and return nothing.

        Every rank calls this for the same tensors in the same order.
        """
        owned = self._owned[name]
        shape, first = owned[0].shard.global_shape, self._mesh.rank == 0
        full = torch.empty(shape if first else (0,), dtype=owned[0].dtype)
        for one in owned:
            piece = self._moved(one)
            for target, source in overlaps(whole(shape).ranges, one.chunks.ranges) if first else ():
                full[target] = piece[source]
        return self._as_built(full, owned[0]) if first else full

    def tensor_of(self, file: WeightsFile, entry: Entry) -> Tensor:  # noqa: ARG002 - by name
        """Return a tensor of a file that uses the model's own names."""
        return self.gathered(entry.name)

    def _moved(self, one: Owned) -> Tensor:
        """Return a shard on the first rank, sent there by its owner."""
        mesh, shape = self._mesh, one.chunks.local_shape
        if one.rank == mesh.rank:
            piece = self._here.tensor(one)
            if mesh.rank != 0 and piece.numel():
                dist.send(near(as_bytes(piece), mesh.world), dst=0, group=mesh.world.group)
            return piece.cpu() if mesh.rank == 0 else piece
        if mesh.rank != 0:
            return torch.empty(0)
        size = one.chunks.elements * one.dtype.itemsize
        sent = torch.empty(size, dtype=torch.uint8, device=mesh.device)
        if size:
            dist.recv(sent, src=one.rank, group=mesh.world.group)
        return sent.cpu().view(one.dtype).view(shape)

    def _as_built(self, full: Tensor, own: Owned) -> Tensor:
        """Return a tensor in the dtype that the constructor gave it.

        A frozen weight that the training rounded to 16 bits gets its initial value back.
        """
        dtype = self._dtype(own)
        if full.dtype in HALF_DTYPES and dtype.itemsize > full.dtype.itemsize:
            for made in self._begun.values((own.key, *self._exported[own.key].aliases)):
                if made.shape == full.shape and torch.equal(made.to(full.dtype), full):
                    return made.to(dtype)
            self.rounded.append(own.key)
        return full.to(dtype)

    def _dtype(self, one: Owned) -> torch.dtype:
        return export_dtype(one.dtype, self._exported[one.key].dtype)


def _note_rounded(names: Sequence[str]) -> str:
    return (
        f"note: {len(names)} frozen weights ({', '.join(names[:4])}{', …' * (len(names) > 4)}) are "
        "exported as the training has them, in 16 bits: give the --weights that they came from"
    )
