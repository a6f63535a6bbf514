"""Gives a rank's modules their weights, from files or from the constructor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from autopar.runtime.model.parts import names_of
from autopar.runtime.ranks.leaving import say
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.options import StartingWeights
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.transport import gathered
from autopar.runtime.tensor.shards import Split, named
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.safetensors_weights import (
    load_safetensors,
    note_left,
    note_unused,
    stored_model,
)
from autopar.runtime.weights.saving.saved_form import SavedForm, UnsavableError
from autopar.runtime.weights.saving.stored_model import StoredModel


def check_same(digests: Mapping[str, int], mesh: Mesh) -> None:
    """Exit if the initial weights of processes differ; `digests` are this process's, by name."""
    if detect_fake_mode() is not None:  # a dry run is a single process
        return
    for axis in (mesh.data, mesh.tensor, mesh.pipeline):
        if axis.size > 1:
            _check_along(axis, digests, mesh.device)


def _check_along(axis: Axis, digests: Mapping[str, int], device: torch.device) -> None:
    names = sorted(digests)
    together = mixed_seed(*(digests[name] for name in names), len(names))
    if not _differ([together], axis, device):
        return
    if _differ([len(names)], axis, device):
        _refuse("their numbers differ")
    differing = _differ([digests[name] for name in names], axis, device)
    _refuse(", ".join(names[place] for place in differing[:3]) + " differ")


def _differ(numbers: list[int], axis: Axis, device: torch.device) -> list[int]:
    """Return the indices at which the ranks of an axis have different numbers."""
    own = torch.tensor(numbers, device=device)
    is_same = (gathered(own, axis) == own).all(0).tolist()
    return [place for place, same in enumerate(is_same) if not same]


def _refuse(found: str) -> None:
    refuse(
        f"build_model makes other weights in each process: {found}",
        fix="seed what it draws from (numpy.random.default_rng(0)), and let no order depend on the "
        "process: sorted(…) around a set; all processes must read the same files",
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
    check_same(recipe.digests(), mesh)

    @cache
    def saved_form() -> SavedForm | None:
        try:
            return recipe.saved_form()
        except UnsavableError as error:
            if mesh.rank == 0:
                say(f"note: {error}, so --weights has to have the names of the model")
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

        The files may have changed, or the training may have been resumed from a checkpoint.
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
