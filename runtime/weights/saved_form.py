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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.runtime.tensor.shards import TensorPlace, group_aliases, places


@dataclass(frozen=True, slots=True)
class View:
    """A view of a tensor's memory."""

    memory: int  # its number in the recording
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        """Return the same view of real memory."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOp:
    """An op that makes memory or writes to it; views need no record."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # tensors are replaced by Views
    keywords: Mapping[str, Any]
    results: tuple[View, ...]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def name(self) -> str:
        """The name of the op's function, without the overload."""
        return str(self.function.__name__).partition(".")[0]


class SavingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records ops on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[SavingOp] = []
        # indices of ops, by the memory they write
        self._writing = defaultdict[int, list[int]](list)
        self._numbers: dict[int, int] = {}  # numbers of memories, by address
        # keeps memories alive, so that no address is reused
        self._kept: list[torch.UntypedStorage] = []

    def view(self, tensor: Tensor) -> View:
        """Describe a meta tensor."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self._numbers:
            self._numbers[memory._cdata] = len(self._kept)
            self._kept.append(memory)
        number, offset = self._numbers[memory._cdata], int(tensor.storage_offset())
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op, and record it if it involves meta tensors."""
        keywords = kwargs or {}
        results = func(*args, **keywords)
        named = tree_map(self._named, (args, keywords))
        read = {view.memory for view in _views(named)}
        made = tuple(map(self.view, filter(_is_meta, tree_leaves(results))))
        written = {self.view(tensor).memory for tensor in _written(func, args, keywords)}
        writes = written | {view.memory for view in made} - read
        for memory in writes:
            self._writing[memory].append(len(self.ops))
        if writes:
            self.ops.append(
                SavingOp(
                    function=func,
                    arguments=named[0],
                    keywords=named[1],
                    results=made,
                    reads=frozenset(read),
                    writes=frozenset(writes),
                )
            )
        return results

    def needed(self, memories: Iterable[int]) -> list[SavingOp]:
        """Return the ops that determine the final contents of memories, in order."""
        found = set[int]()
        waiting = {place for memory in memories for place in self._writing[memory]}
        while waiting:
            found.add(last := waiting.pop())
            read = (self._writing[memory] for memory in self.ops[last].reads)
            waiting |= {place for places in read for place in places if place < last} - found
        return [self.ops[place] for place in sorted(found)]

    def _named(self, leaf: Any) -> Any:
        return self.view(leaf) if _is_meta(leaf) else leaf


def run(op: SavingOp, memories: dict[int, torch.UntypedStorage]) -> None:
    """Run a recorded op on real memories, and add the memories that it makes."""

    def real(leaf: Any) -> Any:
        return leaf.of(memories[leaf.memory]) if isinstance(leaf, View) else leaf

    keywords = tree_map(real, dict(op.keywords))
    if "device" in keywords:
        keywords["device"] = torch.device("cpu")
    results = op.function(*tree_map(real, op.arguments), **keywords)
    made = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    for view, tensor in zip(op.results, made, strict=True):
        if view.memory in op.writes and view.memory not in op.reads:
            memories[view.memory] = laid_out_as(view, tensor).untyped_storage()


def laid_out_as(view: View, tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of a view."""
    if tensor.stride() == view.stride and tensor.storage_offset() == view.offset == 0:
        return tensor
    fresh = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
    return fresh.copy_(tensor)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _views(named: Any) -> Iterator[View]:
    return (leaf for leaf in tree_leaves(named) if isinstance(leaf, View))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the meta tensors that an op's schema marks as written."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from filter(_is_meta, tree_leaves(given))


class UnsavableError(Exception):
    """A run on meta tensors does not show what `save_pretrained` writes; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a file, and the parameters and buffers that it is computed from."""

    file: str  # its path in the folder
    name: str
    view: View
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
    ops: SavingOps
    sources: Mapping[str, View]  # parameters and buffers, by their first names
    prefix: str = ""  # `base_model_prefix`: files may have or lack it before a name

    @property
    def tensors(self) -> Iterator[SavedTensor]:
        """Yield the tensors of all files."""
        for file in self.files:
            yield from file.tensors

    def made(self, tensors: Sequence[SavedTensor], numbers: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute tensors of files from the values of parameters and buffers, `numbers`."""
        ops = self.ops.needed({one.view.memory for one in tensors})
        memories = {
            self.sources[name].memory: laid_out_as(self.sources[name], one).untyped_storage()
            for name, one in numbers.items()
        }
        for memory in frozenset[int]().union(*(op.writes for op in ops)) & memories.keys():
            own = memories[memory]  # memory of the model must not change
            memories[memory] = own.clone()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for op in ops:
                run(op, memories)
        return [one.view.of(memories[one.view.memory]) for one in tensors]


def saved_form(model: nn.Module) -> SavedForm | None:
    """Return the files that the model's `save_pretrained` would write, or None without one.

    The model must be whole, and on the meta device; `save_pretrained` may change it.
    """
    save: Callable[[Path], Any] | None = getattr(model, "save_pretrained", None)
    if save is None:
        return None
    ops = SavingOps()
    sources = {
        group[0].name: ops.view(group[0].tensor)
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
            why = f"{type(error).__name__}: {error}"
            raise UnsavableError(_unsavable(model, why)) from error
        written = [one for one in sorted(folder.rglob("*")) if one.is_file()]
        others = {one.relative_to(folder).as_posix(): one.read_bytes() for one in written}
    prefix = getattr(model, "base_model_prefix", "")
    return SavedForm(
        files=files,
        others=others,
        ops=ops,
        sources=sources,
        prefix=prefix if isinstance(prefix, str) else "",
    )


def _unsavable(model: nn.Module, why: str) -> str:
    name = type(model).__name__
    return f"a run on meta tensors does not show what save_pretrained of {name} writes ({why})"


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


def _file(caught: _Caught, folder: Path, ops: SavingOps, sources: Mapping[str, View]) -> SavedFile:
    """Describe a file that would be written."""
    name = caught.path.relative_to(folder).as_posix()
    names = {one.memory: name for name, one in sources.items()}
    return SavedFile(
        name=name,
        tensors=tuple(
            SavedTensor(
                file=name,
                name=key,
                view=(view := ops.view(one)),
                sources=_sources_of(view, ops, names),
            )
            for key, one in caught.tensors.items()
        ),
        metadata=caught.metadata,
    )


def _sources_of(view: View, ops: SavingOps, names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a tensor is computed from."""
    needed = ops.needed({view.memory})
    read = {view.memory}.union(*(op.reads for op in needed))
    unknown = read - names.keys() - {one.memory for op in needed for one in op.results}
    if unknown:
        raise ValueError("a tensor that it writes is made of no parameter and no buffer")
    return tuple(sorted(names[memory] for memory in read & names.keys()))


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
    answers: dict[_Function, int] = {
        dist.is_initialized: False,
        dist.get_rank: 0,
        dist.get_world_size: 1,
    }
    with _replaced({old: partial(_answered, answer) for old, answer in answers.items()}):
        yield


def _answered(answer: int, *_: Any, **__: Any) -> int:
    return answer


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
