"""Tells what a tensor of the model held when the training began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property

from torch import Tensor

from autopar.runtime.ranks.options import StartingWeights
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.safetensors_weights import stored_model
from autopar.runtime.weights.saving.saved_form import SavedForm, UnsavableError
from autopar.runtime.weights.saving.stored_model import StoredModel


class Begun:
    """Where weights came from: from files, if any were given, or from the constructor."""

    def __init__(self, recipe: Recipe, weights: StartingWeights | None) -> None:
        self.recipe, self._weights = recipe, weights
        self._files = ExitStack()

    def values(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield what a tensor with these names may have begun with: its numbers tell which it was.

        The files may be others by now, or none: a training may have gone on from a checkpoint.
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
        except UnsavableError:  # the weights had the names of the model
            return None
