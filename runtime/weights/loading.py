"""Gives modules their weights, from slices of safetensors files or from the constructor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.model.parts import names_of
from autopar.runtime.ranks.leaving import refuse, say
from autopar.runtime.ranks.locations import Location, check_regular, located
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.options import StartingWeights
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.transport import differing
from autopar.runtime.tensor.shards import (
    Split,
    TensorPlace,
    group_aliases,
    named,
    places,
    tied_names,
)
from autopar.runtime.texts import in_a_line
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.saved_form import SavedForm, UnsavableError
from autopar.runtime.weights.stored_model import StoredModel
from autopar.runtime.weights.stored_tensors import INDEX, ShapeError, fill, open_tensors

__all__ = ["load_weights"]  # for scripts

_READABLE = "let --weights name files that can be read"
_MOST_SHOWN = 5
_MOST_CHARACTERS = 200  # of a tensor's name


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder: Location,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    device: torch.device,
    may_lack: Sequence[str] = (),
    saved_form: Callable[[], SavedForm | None] = lambda: None,
) -> list[str]:
    """Fill a model on meta with this rank's part of every parameter that the files have.

    The files have the model's names, or those that `save_pretrained` writes (see `saved_form`).
    Buffers are filled if the files have them; the rest is left to Recipe.materialise. Returns the
    names of parameters that the files lack, or have in another shape; `may_lack` has to allow this.
    """
    left = list[str]()
    with ExitStack() as files:
        stored = stored_model(folder, files, saved_form)
        found = [
            _FoundTensor.of(model, group, stored, may_lack)
            for group in group_aliases(places(model))
        ]
        _check_all_there([one for one in found if one.is_missing], stored, folder)
        for one in found:
            if one.source is None:
                left += [one.name] if isinstance(one.group[0].tensor, nn.Parameter) else []
                continue
            try:
                shape = tuple(one.source.get_shape())
                fill(one.group, one.source, splits, axis, shape=shape, device=device)
            except ShapeError as error:
                if one.is_spared:
                    left.append(one.name)
                    continue
                refuse(
                    f"weights of {folder} do not fit: {error}",
                    fix="give weights of a model of these sizes, or plan for theirs (--arg …); "
                    f"{_allowing(one.name)}",
                )
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundTensor:
    """A tensor of the model, and its source in the files."""

    group: list[TensorPlace]
    source: Any  # None: not in the files
    is_spared: bool  # --allow-missing covers it
    is_missing: bool  # the files lack it, but should have it

    @classmethod
    def of(
        cls,
        model: nn.Module,
        group: list[TensorPlace],
        stored: StoredModel,
        may_lack: Sequence[str],
    ) -> _FoundTensor:
        """Look a tensor up under each of its names, also those in other stages."""
        first = group[0]
        names = [name for place in group for name in tied_names(model, place.name)]
        source = stored.source(names)
        is_spared = any(fnmatchcase(name, pattern) for name in names for pattern in may_lack)
        is_missing = (
            source is None
            and isinstance(first.tensor, nn.Parameter)
            and not is_spared
            and stored.is_expected(names)
        )
        return cls(group=group, source=source, is_spared=is_spared, is_missing=is_missing)

    @property
    def name(self) -> str:
        """The tensor's first name."""
        return self.group[0].name


def _allowing(name: str) -> str:
    """Return a hint: the option that allows files to lack a parameter."""
    module, dot, _ = name.rpartition(".")
    pattern = f"{module}.*" if dot else name
    return f'--allow-missing "{pattern}" leaves it the values of the constructor'


def note_left(names: Sequence[str], mesh: Mesh) -> None:
    """Print on the first rank of each stage which parameters keep the constructor's values."""
    if names and mesh.data.rank == mesh.tensor.rank == 0:
        say(
            f"note: {len(names)} weights are not from --weights, but from the constructor: "
            f"{_shown(names)}"
        )


def _shown(names: Sequence[str]) -> str:
    """Return the first few names, each safe to print in a line."""
    shown = (in_a_line(name)[:_MOST_CHARACTERS] for name in names[:_MOST_SHOWN])
    return ", ".join(shown) + (" …" if len(names) > _MOST_SHOWN else "")


def note_unused(
    folder: Location,
    names: Collection[str],
    mesh: Mesh,
    saved_form: Callable[[], SavedForm | None] = lambda: None,
) -> None:
    """Print on the first rank which tensors in the files do not belong to the model."""
    if mesh.rank != 0:
        return
    with ExitStack() as files:
        stored = stored_model(folder, files, saved_form)
        unused = stored.unused(names)
    if unused:
        say(
            f"note: {len(unused)} of the {len(stored.stored)} tensors in {folder} are none of the "
            f"model's, and are not used: {_shown(unused)}"
        )


def stored_model(
    folder: Location, files: ExitStack, saved_form: Callable[[], SavedForm | None]
) -> StoredModel:
    """Open the files of a model's weights."""
    return StoredModel(
        stored=dict(_open(folder, files)), saved_form=saved_form, is_folder=not folder.is_file()
    )


def _open(folder: Location, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name with its open file."""
    from safetensors import SafetensorError

    for path in _paths(folder):
        try:
            file = files.enter_context(open_tensors(path))
        except SafetensorError as error:
            refuse(
                f"{path} is not a whole .safetensors file: {error}",
                fix="copy it again; convert a .pt file with safetensors.torch.save_file",
            )
        except OSError as error:
            refuse(f"{path} cannot be read: {error.strerror or error}", fix=_READABLE)
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file


def _paths(folder: Location) -> Sequence[Location]:
    """Return the named file, or all files of a folder."""
    try:
        check_regular(folder)
        if not folder.exists():
            refuse(f"there is no {folder}", fix="--weights names a .safetensors file, or a folder")
        paths = [folder] if folder.is_file() else _in_folder(folder)
    except OSError as error:
        refuse(f"{folder} cannot be read: {error.strerror}", fix=_READABLE)
    if not paths:
        refuse(
            f"{folder} holds no .safetensors file", fix="--weights names one, or the folder of them"
        )
    return paths


def _in_folder(folder: Location) -> list[Location]:
    """Return the weight files of a folder: those in its index, or all."""
    index = folder / INDEX
    if not index.exists():
        return located(folder, "*.safetensors")
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        refuse(f"{index} does not say which file has which tensor", fix="copy it again")
    missing = [name for name in named if not (folder / name).exists()]
    if missing:
        refuse(f"{folder} lacks {_shown(missing)}, which {INDEX} names", fix="copy it again, whole")
    return [folder / name for name in named]


def _check_all_there(
    missing: Sequence[_FoundTensor], stored: StoredModel, folder: Location
) -> None:
    if not missing:
        return
    names = [one.name for one in missing]
    refuse(
        f"{folder} lacks {len(names)} parameters: {_shown(names)}; "
        f"it has {_shown(sorted(stored.stored))}",
        fix=f"give weights of this model, under its names; {_allowing(names[0])}",
    )


def check_same(recipe: Recipe, mesh: Mesh) -> None:
    """Exit if the initial weights of processes differ."""
    names = sorted(recipe.shapes.keys() - recipe.bare.keys())
    own = list(map(recipe.digest, names))
    for axis in (mesh.data, mesh.tensor, mesh.pipeline):
        if not differing([mixed_seed(*own, len(own))], axis, mesh):
            continue
        found = "one has more tensors than another"
        if not differing([len(own)], axis, mesh):
            others = [names[place] for place in differing(own, axis, mesh)]
            found = f"{', '.join(others[:3])} differ"
        refuse(
            f"build_model makes different weights in each process: {found}",
            fix="seed what it draws from (numpy.random.default_rng(0)), and avoid orders that "
            "differ in processes: sorted(…) around a set; all processes must read the same files",
        )


NOTHING_SPLIT: Mapping[str, Split] = MappingProxyType({})


def load_weights(
    parts: Sequence[nn.Module],
    recipe: Recipe,
    weights: StartingWeights | None,
    mesh: Mesh,
    *,
    splits: Mapping[str, Split] = NOTHING_SPLIT,
) -> None:
    """Give parameters and buffers on meta this rank's part of their values.

    Values come from the safetensors files if these have them, else from the recipe. In the names of
    `splits`, * stands for any number, such as that of a layer.
    """
    check_same(recipe, mesh)

    @cache
    def saved_form() -> SavedForm | None:
        try:
            return recipe.saved_form()
        except UnsavableError as error:
            mesh.say(f"note: {error}, so --weights has to have the names of the model")
            return None

    if weights is not None:
        note_unused(weights.files, recipe.shapes, mesh, saved_form)
    left: list[str] = []
    for part in parts:
        own = named(splits, names_of(part))
        if weights is not None:
            left += load_safetensors(
                part,
                weights.files,
                own,
                mesh.tensor,
                device=mesh.device,
                may_lack=weights.may_lack,
                saved_form=saved_form,
            )
        recipe.materialise(part, own, mesh.tensor, mesh.device)
    note_left(left, mesh)


class WeightsOrigin:
    """The origin of a training's weights: files, if any were given, or the constructor."""

    def __init__(self, recipe: Recipe, weights: StartingWeights | None) -> None:
        self.recipe, self._weights = recipe, weights
        self._files = ExitStack()

    def values(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the possible initial values of a tensor; the caller compares to find the true ones.

        The files may have changed, or the training may have begun without them, before a resume.
        """
        stored = None if self._stored is None else self._stored.source(names)
        if stored is not None:
            yield stored[...]
        yield from (self.recipe.make(one) for one in names if one in self.recipe.shapes)

    @cached_property
    def _stored(self) -> StoredModel | None:
        if self._weights is None or not self._weights.files.exists():
            return None
        return stored_model(self._weights.files, self._files, self._form)

    def _form(self) -> SavedForm | None:
        try:
            return self.recipe.saved_form()
        except UnsavableError:  # the files had the model's own names
            return None
