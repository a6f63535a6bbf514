"""Keeps recorded ops, such as those of a constructor, and replays the ops of single tensors.

Replaying a tensor runs again, on the CPU, the recorded ops that determine its values. They are
found by walking backwards from the tensor's storage. An op is recorded if it makes or writes to a
storage; views need no record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autopar.runtime.weights.plain_model import REJECTING, GeneratorState
from autopar.runtime.weights.recording.constants import Constants

CPU = torch.device("cpu")
OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_"} | {
    REJECTING
}
COPIES = {"clone", "_to_copy"}
BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
# ops write to these arguments, although their schemas do not say so
UNMARKED = ("running_mean", "running_var")


class UnrecordableError(Exception):
    """The constructor does something that cannot be replayed tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Value:
    """A recorded tensor: a storage, and a view of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the same view of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """A recorded op; if it is random, with the state of its generator."""

    function: Callable[..., Any]
    draw: GeneratorState | None
    arguments: tuple[Any, ...]  # tensors are replaced by Values
    keywords: Mapping[str, Any]
    makes: tuple[Value | None, ...]  # its outputs; None for those without a new storage
    writes: frozenset[int]  # storages that it changes or makes
    reads: frozenset[int]  # storages that it reads
    overwrites: frozenset[int]  # storages that it overwrites without reading them
    default_dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the op's function, without the overload."""
        return self.function.__name__.split(".")[0]

    @property
    def made(self) -> set[int]:
        """The storages that the op makes."""
        return {value.storage for value in self.makes if value}


@dataclass(frozen=True, slots=True)
class CopiedConstant:
    """A tensor that is only a copied and cast constant, so a slice of it can be read alone."""

    constant: Tensor
    dtypes: tuple[torch.dtype, ...]

    def __getitem__(self, index: Any) -> Tensor:
        part = self.constant[index]
        for dtype in self.dtypes:
            part = part.to(dtype)
        return part


class History:
    """The ops of a constructor in order, and the constants that they read."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self.constants = Constants()
        # op numbers, by the storages they write
        self._touching: dict[int, list[int]] = defaultdict(list)
        self._states: dict[int, Tensor] = {}  # states of the default generator, after ops that drew

    def add(self, op: RecordedOp) -> None:
        """Append an op."""
        for storage in op.writes:
            self._touching[storage].append(len(self.ops))
        self.ops.append(op)

    def bare(self) -> frozenset[int]:
        """Return the storages that never get values, including copies of such storages."""
        bare: frozenset[int] = frozenset()
        for op in self.ops:
            if "empty" in op.name or (op.name in COPIES and op.reads <= bare):
                bare |= op.made
            else:
                bare -= op.writes
        return bare

    def replay(
        self,
        values: Iterable[Value],
        *,
        before: int | None = None,
        given: Mapping[int, torch.UntypedStorage] = MappingProxyType({}),
    ) -> list[Tensor]:
        """Compute tensors as they are at the end, or before an op; run only the needed ops.

        `given` are storages that no op makes and that are no constants; the ops may write to them.
        """
        values, storages = list(values), dict(given)
        wanted = {value.storage for value in values}
        selected = self._needed(wanted, len(self.ops) if before is None else before)
        reads = wanted.union(*(self.ops[number].reads for number in selected))
        with plainly(), torch.no_grad(), generator_kept():
            for storage in reads:
                if storage in self.constants:
                    storages[storage] = _copied(self.constants[storage])
            for number in selected:
                self._run(number, storages)
            return [value.of(storages[value.storage]) for value in values]

    def ops_for(self, values: Iterable[Value]) -> list[RecordedOp]:
        """Return the ops that determine tensors, in order."""
        needed = self._needed({value.storage for value in values}, len(self.ops))
        return [self.ops[number] for number in needed]

    def origin(self, draw: GeneratorState) -> tuple[GeneratorState, int]:
        """Return the last draw up to `draw` with a known state, and how many draws follow it."""
        steps = 0
        while draw.behind is not None:
            before = self.ops[draw.behind].draw
            assert before is not None
            draw, steps = before, steps + 1
        return draw, steps

    def copied(self, value: Value) -> CopiedConstant | None:
        """Return a tensor as a copied and cast constant, or None if it is computed otherwise."""
        dtypes: list[torch.dtype] = []
        before = len(self.ops)
        while True:
            touching = [number for number in self._touching[value.storage] if number < before]
            if not touching:
                constant = self._constant(value)
                return (
                    constant if constant is None else CopiedConstant(constant, tuple(dtypes[::-1]))
                )
            before = touching[-1]
            source = _source(self.ops[before], value)
            if source is None:
                return None
            dtypes.append(value.dtype)
            value = source

    def _constant(self, value: Value) -> Tensor | None:
        """Return the view of a constant, or None if the tensor is none or has another dtype."""
        if value.storage not in self.constants:
            return None
        real = self.constants[value.storage]
        if value.dtype is not real.dtype:
            return None
        return real.as_strided(value.size, value.stride, real.storage_offset() + value.offset)

    def _needed(self, storages: Iterable[int], before: int) -> list[int]:
        """Return the ops that determine storages, in order."""
        contents, existing = set(storages), set(storages)
        waiting, needed = set[int](), list[int]()
        for storage in contents:
            waiting.update(number for number in self._touching[storage] if number < before)
        while waiting:
            number = max(waiting)
            waiting.discard(number)
            op = self.ops[number]
            if not (op.writes & contents or op.made & existing):
                continue
            needed.append(number)
            contents -= op.overwrites | op.made
            existing -= op.made
            contents |= op.reads
            existing |= op.reads | op.overwrites
            for storage in op.reads | op.overwrites:
                waiting.update(other for other in self._touching[storage] if other < number)
        return needed[::-1]

    def _run(self, number: int, storages: dict[int, torch.UntypedStorage]) -> None:
        op = self.ops[number]
        if op.draw is not None:
            self._set_generator(op.draw)
        outputs = _called(op, lambda value: value.of(storages[value.storage]))
        made = [out for out in tree_leaves(outputs) if isinstance(out, Tensor)]
        for value, tensor in zip(op.makes, made, strict=True):
            if value is not None:
                if tuple(tensor.shape) != value.size or tensor.dtype is not value.dtype:
                    raise UnrecordableError(
                        "an op's result has another shape or dtype than on meta"
                    )
                storages[value.storage] = laid_out_as(value, tensor).untyped_storage()

    def _set_generator(self, draw: GeneratorState) -> None:
        """Set the default generator to its state before a draw."""
        generator = torch.default_generator
        if draw.seed is not None:
            generator.manual_seed(draw.seed)
        elif draw.state is not None:
            generator.set_state(draw.state)
        elif draw.behind is not None:
            generator.set_state(self.state_behind(draw.behind))

    def state_behind(self, number: int) -> Tensor:
        """Return the default generator's state after a random op.

        The random ops after the last known state are run again, up to this one.
        """
        chain: list[int] = []
        last: int | None = number
        while last is not None and last not in self._states:
            chain.append(last)
            draw = self.ops[last].draw
            last = draw.behind if draw else None
        with plainly(), torch.no_grad(), generator_kept():
            for one in reversed(chain):
                self._states[one] = self._state_after_drawing(one)
        return self._states[number]

    def _state_after_drawing(self, number: int) -> Tensor:
        op = self.ops[number]
        leaves = {leaf for leaf in tree_leaves(_given(op)) if isinstance(leaf, Value)}
        read = [value for value in leaves if value.storage not in op.overwrites]
        real = dict(zip(read, self.replay(read, before=number), strict=True))
        if op.draw is not None:
            self._set_generator(op.draw)
        _called(op, lambda value: real[value] if value in real else _empty(value))
        return torch.default_generator.get_state()


@contextmanager
def plainly() -> Iterator[None]:
    """Run ops inside without any mode, of the recording or of the user."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def generator_kept() -> Iterator[None]:
    """Restore torch's default generator afterwards."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of an op, with the device CPU."""
    return {**kwargs, "device": CPU} if "device" in kwargs else dict(kwargs)


def _given(op: RecordedOp) -> tuple[Any, ...]:
    return op.arguments, dict(op.keywords)


def _called(op: RecordedOp, real: Callable[[Value], Tensor]) -> Any:
    args, kwargs = tree_map(lambda x: real(x) if isinstance(x, Value) else x, _given(op))
    default = torch.get_default_dtype()
    torch.set_default_dtype(op.default_dtype)
    try:
        return op.function(*args, **on_cpu(kwargs))
    finally:
        torch.set_default_dtype(default)


def _source(op: RecordedOp, value: Value) -> Value | None:
    """Return the tensor that an op copied as a whole, or None for other ops."""
    source: Any = None
    if op.name in COPIES and op.makes[0] == value:
        source = op.arguments[0]
    elif op.name == "copy_" and op.arguments[0] == value:
        source = op.arguments[1]
    is_whole = isinstance(source, Value) and source.size == value.size
    return source if is_whole else None


def _empty(value: Value) -> Tensor:
    return torch.empty_strided(value.size, value.stride, dtype=value.dtype)


def _copied(constant: Tensor) -> torch.UntypedStorage:
    fresh = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype)
    return fresh.copy_(constant).untyped_storage()


def laid_out_as(value: Value, tensor: Tensor) -> Tensor:
    """Return a tensor with the recorded strides: the tensor, or a copy if its strides differ."""
    if tensor.stride() == value.stride and tensor.storage_offset() == value.offset:
        return tensor
    fresh = torch.empty_strided(value.size, value.stride, dtype=value.dtype)
    return fresh.copy_(tensor)


def asks_for_values(func: Any) -> bool:
    """Whether an op returns a value, such as .item() and equal(), not a tensor."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(value.type) for value in returns)


def takes(func: Any, name: str) -> bool:
    """Whether an op has an argument with this name."""
    return any(argument.name == name for argument in func._schema.arguments)


def is_written(argument: Any) -> bool:
    """Whether an op writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an op's schema marks as written."""
    if not isinstance(func, OpOverload):  # an initialiser
        yield args[0]
        return
    if func.__name__.startswith("set_."):
        return  # gives the tensor other memory, and writes no values
    unmarked = UNMARKED if func.__name__.split(".")[0] in BATCH_NORMS else ()
    for position, argument in enumerate(func._schema.arguments):
        if is_written(argument) or argument.name in unmarked:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def storages_of(arguments: Any) -> set[int]:
    """Return the storages of all recorded tensors among arguments."""
    return {leaf.storage for leaf in tree_leaves(arguments) if isinstance(leaf, Value)}
