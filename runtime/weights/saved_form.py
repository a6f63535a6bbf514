"""Finds what a model's `save_pretrained` would write, from a run on meta tensors.

The method runs on the meta device, and its ops are recorded. Each tensor that it passes to
safetensors can then be computed from the parameters and buffers that it depends on. The contents of
other files (`config.json`) are taken from this run.
"""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.runtime.tensor.shards import TensorPlace, group_aliases, places
from autopar.runtime.weights.recording.recorded_ops import (
    History,
    RecordedOp,
    Value,
    laid_out_as,
    storages_of,
    written_by,
)


class SavingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records ops on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history = History()
        self._numbers: dict[int, int] = {}  # numbers of storages, by address
        # keeps storages alive, so that no address is reused
        self._kept: list[torch.UntypedStorage] = []

    def value(self, tensor: Tensor) -> Value:
        """Describe a meta tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._kept)
            self._kept.append(storage)
        number, offset = self._numbers[storage._cdata], int(tensor.storage_offset())
        return Value(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record it if it makes or writes to a meta tensor."""
        keywords = kwargs or {}
        results = func(*args, **keywords)
        named = tree_map(self._named, (args, keywords))
        reads = storages_of(named)
        written = map(self._named, written_by(func, args, keywords))
        made = (self._named(one) for one in tree_leaves(results) if isinstance(one, Tensor))
        makes = [one if storages_of(one) - reads else None for one in made]
        writes = storages_of((*written, *makes))
        if writes:
            self.history.add(
                RecordedOp(
                    function=func,
                    draw=None,
                    arguments=named[0],
                    keywords=named[1],
                    makes=tuple(makes),
                    writes=frozenset(writes),
                    reads=frozenset(reads),
                    overwrites=frozenset(),
                    default_dtype=torch.get_default_dtype(),
                )
            )
        return results

    def _named(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf


class UnsavableError(Exception):
    """A run on meta tensors does not show what `save_pretrained` writes; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a file, and the parameters and buffers that it is computed from."""

    file: str  # its path in the folder
    name: str
    value: Value
    sources: tuple[str, ...]  # their first names in the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A .safetensors file that would be written."""

    name: str  # its path in the folder
    tensors: tuple[SavedTensor, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForm:
    """All files that a model's `save_pretrained` writes."""

    files: tuple[SavedFile, ...]
    others: Mapping[str, bytes]  # contents of other files, by their paths in the folder
    history: History
    sources: Mapping[str, Value]  # parameters and buffers, by their first names
    prefix: str = ""  # `base_model_prefix`: files may have or lack it before a name

    @property
    def tensors(self) -> Iterator[SavedTensor]:
        """Yield the tensors of all files."""
        for file in self.files:
            yield from file.tensors

    def made(self, tensors: Sequence[SavedTensor], numbers: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute tensors of files from the values of parameters and buffers, `numbers`."""
        values = [one.value for one in tensors]
        storages = {
            self.sources[name].storage: laid_out_as(self.sources[name], one).untyped_storage()
            for name, one in numbers.items()
        }
        written = (op.writes for op in self.history.ops_for(values))
        for storage in frozenset[int]().union(*written) & storages.keys():
            own = storages[storage]  # memory of the model must not change
            storages[storage] = own.clone()  # type: ignore[no-untyped-call]
        return self.history.replay(values, given=storages)


def saved_form(model: nn.Module) -> SavedForm | None:
    """Return the files that the model's `save_pretrained` would write, or None without one.

    The model must be whole, and on the meta device; `save_pretrained` may change it.
    """
    save: Callable[[Path], Any] | None = getattr(model, "save_pretrained", None)
    if save is None:
        return None
    ops = SavingOps()
    sources = {
        group[0].name: ops.value(group[0].tensor)
        for group in group_aliases(places(model))
        if _is_saved_whole(group[0])
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with _as_one_process(), _catching() as caught, torch.no_grad(), ops:
                save(folder)
            files = tuple(_file(one, folder, ops, sources) for one in caught)
            if not files:
                raise ValueError("it hands no tensors to safetensors")
        except Exception as error:  # a method may raise anything on meta tensors
            name, why = type(model).__name__, f"{type(error).__name__}: {error}"
            raise UnsavableError(
                f"a run on meta tensors does not show what save_pretrained of {name} writes ({why})"
            ) from error
        written = [one for one in sorted(folder.rglob("*")) if one.is_file()]
        others = {one.relative_to(folder).as_posix(): one.read_bytes() for one in written}
    prefix = getattr(model, "base_model_prefix", "")
    return SavedForm(
        files=files,
        others=others,
        history=ops.history,
        sources=sources,
        prefix=prefix if isinstance(prefix, str) else "",
    )


def _is_saved_whole(place: TensorPlace) -> bool:
    """Whether a tensor belongs to a state dict, and fills its memory."""
    size_bytes = place.tensor.numel() * place.tensor.itemsize
    is_alone = size_bytes == place.tensor.untyped_storage().nbytes()
    return is_alone and place.attribute not in place.module._non_persistent_buffers_set


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caught:
    """The arguments of one call of safetensors' save_file."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def _file(caught: _Caught, folder: Path, ops: SavingOps, sources: Mapping[str, Value]) -> SavedFile:
    """Describe a file that would be written."""
    name = caught.path.relative_to(folder).as_posix()
    names = {one.storage: name for name, one in sources.items()}
    return SavedFile(
        name=name,
        tensors=tuple(
            SavedTensor(
                file=name,
                name=key,
                value=(value := ops.value(one)),
                sources=_sources_of(value, ops.history, names),
            )
            for key, one in caught.tensors.items()
        ),
        metadata=caught.metadata,
    )


def _sources_of(value: Value, history: History, names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a tensor is computed from."""
    needed = history.ops_for([value])
    read = {value.storage}.union(*(op.reads for op in needed))
    unknown = read - names.keys() - set[int]().union(*(op.made for op in needed))
    if unknown:
        raise ValueError("a tensor that it writes is made of no parameter and no buffer")
    return tuple(sorted(names[storage] for storage in read & names.keys()))


_Function = Callable[..., Any]


@contextmanager
def _catching() -> Iterator[list[_Caught]]:
    """Intercept calls of safetensors' save function, under every name that modules import it as."""
    found: list[_Caught] = []

    def save_file(
        tensors: Mapping[str, Tensor],
        filename: str | Path,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        found.append(
            _Caught(path=Path(filename), tensors=dict(tensors), metadata=dict(metadata or {}))
        )

    def save(*_: Any, **__: Any) -> None:
        raise TypeError("it writes weights by torch.save, not by safetensors")

    with _replaced({safetensors.torch.save_file: save_file, torch.save: save}):
        yield found


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Make libraries act as in a single process, because only the first rank would write files."""
    answers: dict[_Function, _Function] = {
        dist.is_initialized: lambda: False,
        dist.get_rank: lambda *_, **__: 0,
        dist.get_world_size: lambda *_, **__: 1,
    }
    with _replaced(answers):
        yield


@contextmanager
def _replaced(new: Mapping[_Function, _Function]) -> Iterator[None]:
    """Replace functions in all modules, and restore them, also in modules imported inside."""
    old = {one: function for function, one in new.items()}
    _replace(new)
    try:
        yield
    finally:
        _replace(old)


def _replace(functions: Mapping[_Function, _Function]) -> None:
    """Replace functions under all names that modules have for them."""
    by_id = {id(old): new for old, new in functions.items()}
    for module in list(sys.modules.values()):
        own = getattr(module, "__dict__", {})
        if by_id.keys().isdisjoint(map(id, own.values())):  # nearly all modules
            continue
        for name, value in list(own.items()):
            if id(value) in by_id:
                own[name] = by_id[id(value)]


@contextmanager
def unseen() -> Iterator[None]:
    """Hide what libraries print about files that the code inside does not really write."""
    with (
        warnings.catch_warnings(action="ignore"),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        yield
