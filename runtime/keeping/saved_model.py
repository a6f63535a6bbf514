"""Turns the weights of a training into the tensors that a model's `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from autopar.runtime.keeping.model_files import ModelFiles, WeightsFile
from autopar.runtime.keeping.places import EXPORT_MARK
from autopar.runtime.keeping.safetensors_file import Entry
from autopar.runtime.ranks.outputs import MARK
from autopar.runtime.weights.saving.saved_form import SavedFile, SavedForm, SavedTensor

_INDEX = ".safetensors.index.json"


class SavedModel:
    """The tensors of an export, of which those that share a source are made together.

    `weight_of` returns a weight of the training. It is called once for each name in `weights`, in
    that order.
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
        """Return the names of the weights that are needed, in the order of their use."""
        numbers = dict.fromkeys(
            self._number[file.name, one.name] for file in self.files.weights for one in file.entries
        )
        return tuple(name for number in numbers for name in _sources(self._groups[number]))

    def tensor_of(self, file: WeightsFile, entry: Entry) -> Tensor:
        """Return a tensor of a file; each is asked for once."""
        key = file.name, entry.name
        if key not in self._made:
            group = self._groups[self._number[key]]
            weights = {name: self._weight_of(name) for name in _sources(group)}
            made = self._form.made(group, weights)
            self._made |= {(one.file, one.name): own for one, own in zip(group, made, strict=True)}
        return self._made.pop(key)

    def _file(self, file: SavedFile) -> WeightsFile:
        """Return a file whose tensors stand group by group, wide numbers first."""
        tensors = sorted(
            file.tensors,
            key=lambda one: (-one.view.dtype.itemsize, self._number[one.file, one.name], one.name),
        )
        return WeightsFile(
            name=file.name,
            entries=tuple(
                Entry(name=one.name, dtype=one.view.dtype, shape=one.view.size) for one in tensors
            ),
            metadata={**file.metadata, **EXPORT_MARK},
        )


def _groups(tensors: Iterable[SavedTensor]) -> Iterable[tuple[SavedTensor, ...]]:
    """Part tensors into groups, none of which needs a source of another one."""
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
    """Return the JSON of an index that says who has written it."""
    said = json.loads(index)
    metadata: Mapping[str, object] = said.get("metadata", {})
    return f"{json.dumps({**said, 'metadata': {**metadata, **MARK}}, indent=2)}\n"
