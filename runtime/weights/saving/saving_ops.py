"""Records the ops that a method applies to tensors without memory, and runs them on real ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: which memory it looks at, and how."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        """Look at real memory in the same way."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOp:
    """An op that makes memory or writes to some; views need no record."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # in which views stand for tensors
    keywords: Mapping[str, Any]
    results: tuple[View, ...]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def name(self) -> str:
        """The name of its function, without that of an overload."""
        return str(self.function.__name__).partition(".")[0]


class SavingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region in which ops on tensors of the meta device are recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[SavingOp] = []
        self._writing = defaultdict[int, list[int]](list)  # the places of ops, by memory
        self._numbers: dict[int, int] = {}  # of memories, by their addresses
        self._kept: list[torch.UntypedStorage] = []  # lest an address is used again

    def view(self, tensor: Tensor) -> View:
        """Describe a tensor of the meta device."""
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
        """Run an op, and record it if it has to do with tensors of the meta device."""
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
        """Return the ops that decide what memories hold at the end, in their order."""
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
    """Run a recorded op on real memories, and add those that it makes."""

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
    """Return a tensor whose numbers lie in memory as a view has them."""
    if tensor.stride() == view.stride and tensor.storage_offset() == view.offset == 0:
        return tensor
    fresh = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
    return fresh.copy_(tensor)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _views(named: Any) -> Iterator[View]:
    return (leaf for leaf in tree_leaves(named) if isinstance(leaf, View))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of the meta device that an op's schema says it changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from filter(_is_meta, tree_leaves(given))
