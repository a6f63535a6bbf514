"""Finds tensors of a model in files: under its own names, or those of its `save_pretrained`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.runtime.weights.saving.pieced_tensors import PiecedTensor, StoredPiece
from autopar.runtime.weights.saving.saved_form import SavedForm
from autopar.runtime.weights.saving.saved_pieces import Piece, pieces_by_name


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """The tensors of files, and what a model's `save_pretrained` would write.

    In a folder a name means what it means there, for that is what libraries write: a weight may
    be turned, and have the name that it has in the model. In a file it means the model's own.
    """

    stored: Mapping[str, Any]  # the open file of each tensor
    ask: Callable[[], SavedForm | None]
    is_folder: bool

    def source(self, names: Sequence[str]) -> Any:
        """Return a tensor of the model, of which slices are read, or None if it is not there."""
        own = next((name for name in names if name in self.stored), None)
        saved = next((name for name in names if name in self._pieces), None)
        if saved is not None and self._form is not None and (self.is_folder or own is None):
            pieces = tuple(
                StoredPiece(piece=one, stored=self._slice(self._places[one.name]))
                for one in self._pieces[saved]
            )
            return PiecedTensor(tensor=self._form.sources[saved], pieces=pieces)
        return None if own is None else self._slice(own)

    def is_expected(self, names: Collection[str]) -> bool:
        """Whether the files should have a tensor: adapters, say, are saved without their base."""
        return self._form is None or self._has_all or not self._saved.isdisjoint(names)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return which tensors of the files are none of a model that has these names."""
        left = sorted(name for name in self.stored if name not in names)
        used = set(self._places.values()) if left else set()
        return [name for name in left if name not in used]

    def _slice(self, name: str) -> Any:
        return self.stored[name].get_slice(name)

    @cached_property
    def _form(self) -> SavedForm | None:
        return self.ask()

    @cached_property
    def _saved(self) -> frozenset[str]:
        """The tensors of the model that `save_pretrained` writes."""
        tensors = self._form.tensors if self._form is not None else ()
        return frozenset(name for one in tensors for name in one.sources)

    @cached_property
    def _has_all(self) -> bool:
        """Whether the files have tensors of the model that `save_pretrained` leaves out."""
        every = self._form.sources if self._form is not None else {}
        return any(name in self.stored for name in every if name not in self._saved)

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """The names that `save_pretrained` gives, each with that in the files."""
        tensors = self._form.tensors if self._form is not None else ()
        found = ((one.name, self._place(one.name)) for one in tensors)
        return {name: place for name, place in found if place is not None}

    def _place(self, name: str) -> str | None:
        """Return what a name is in the files, which may have a base model without its head."""
        prefix = f"{self._form.prefix}." if self._form is not None and self._form.prefix else ""
        names = (name, f"{prefix}{name}", name.removeprefix(prefix))
        return next((one for one in names if one in self.stored), None)

    @cached_property
    def _pieces(self) -> Mapping[str, tuple[Piece, ...]]:
        """The pieces of the model's tensors that are in the files as a whole."""
        every = pieces_by_name(self._form) if self._form is not None else {}
        return {
            name: pieces
            for name, pieces in every.items()
            if all(one.name in self._places for one in pieces)
        }
