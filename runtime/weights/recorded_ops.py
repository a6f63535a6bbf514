"""Records the tensor ops of a model's constructor on the meta device, to be replayed for real.

Tensors are known by their storage: an op is recorded when it makes a storage or writes to one;
views need no record. What a parameter's storage needs is found by walking the ops backwards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autopar.runtime.weights.draws import REJECTING, Draw, Draws, is_random

META = torch.device("meta")
CPU = torch.device("cpu")
OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_"} | {
    REJECTING
}
COPIES = {"clone", "_to_copy"}


class UnrecordableError(Exception):
    """A constructor that does what cannot be replayed tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the recording: a storage and how it is looked at."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Look at a real storage in the same way."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """One op of the constructor; if it is random, what it draws."""

    function: Callable[..., Any]
    draw: Draw | None
    arguments: tuple[Any, ...]  # Values stand for tensors
    keywords: Mapping[str, Any]
    makes: tuple[Value | None, ...]  # its outputs that are new storages
    writes: frozenset[int]  # the storages that it changes or makes
    reads: frozenset[int]  # the storages whose contents must be right before it
    overwrites: frozenset[int]  # the storages that it changes without looking at them
    default_dtype: torch.dtype


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region in which new tensors are made on the meta device and every op is written down."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = Draws(seed)
        self.ops: list[RecordedOp] = []
        self.constants: dict[int, Tensor] = {}
        self.failure: Exception | None = None  # which the constructor may have caught
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, lest an address is used again
        self._stand_ins: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op on the meta device and record it, or answer a question about values."""
        try:
            return self._recorded(func, args, kwargs or {})
        except Exception as error:
            self.failure = error
            raise

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if given and not any(is_recorded(tensor) for tensor in given):
            return func(*args, **kwargs)  # real numbers from elsewhere, among themselves
        if not all(is_recorded(tensor) for tensor in _written(func, args, kwargs)):
            raise UnrecordableError(f"{func} writes into a tensor that was not made by an op")
        args, kwargs = tree_map(self.on_meta, (args, kwargs))
        if _asks_for_values(func):
            return func(*self.real(args), **self.real(kwargs))
        if "device" in kwargs or (not given and _takes_a_device(func)):
            kwargs = {**kwargs, "device": META}
        written = list(_written(func, args, kwargs))
        draw = self._drawn(func, args, kwargs) if is_random(func) else None
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}  # its state is in what was drawn
        try:
            outputs = func(*args, **kwargs)
        except NotImplementedError:  # torch knows its results by computing them alone
            if written:
                raise
            outputs = tree_map(_stand_in, func(*self.real(args), **_on_cpu(self.real(kwargs))))
        self._write_down(func, args, kwargs, outputs=outputs, written=written, draw=draw)
        return outputs

    def write_down_initialiser(
        self, function: Any, tensor: Tensor, *args: Any, generator: Any = None
    ) -> None:
        """Record a function that fills a tensor at random, without running it."""
        draw = self._drawn(function, (tensor, *args), {"generator": generator})
        self._write_down(function, (tensor, *args), {}, outputs=tensor, written=[tensor], draw=draw)

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        """Note what a random op draws; one that goes on from a state moves that as it would."""
        with self.draws.one(kwargs.get("generator")) as draw:
            if draw.state is not None:
                real = self.real(args), _on_cpu(self.real(kwargs))
                with _disable_current_modes():
                    func(*real[0], **real[1])
            return draw

    def value(self, tensor: Tensor) -> Value:
        """Name a tensor of the constructor, a real one as a constant."""
        tensor = self.on_meta(tensor)
        storage = tensor.untyped_storage()
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return Value(storage._cdata, tensor.dtype, size, stride, offset)

    def replay(self, values: Iterable[Value]) -> list[Tensor]:
        """Compute what tensors of the constructor hold, running only the ops that they need."""
        values = list(values)
        return replay(self.ops, self.constants, values)

    def bare(self) -> frozenset[int]:
        """Return the storages that were never given numbers: what they hold is left to chance."""
        return bare_storages(self.ops)

    def on_meta(self, leaf: Any) -> Any:
        """Let a real tensor be represented by a meta tensor, and remember its numbers."""
        if not isinstance(leaf, Tensor) or is_recorded(leaf):
            return leaf
        key = (id(leaf), leaf._version)
        if key not in self._stand_ins:
            stand_in = torch.empty(leaf.shape, dtype=leaf.dtype, device=META)
            self._stand_ins[key] = (stand_in, leaf)
            numbers = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            self.constants[self._keep(stand_in)] = numbers
        return self._stand_ins[key][0]

    def _keep(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return int(storage._cdata)

    def real(self, arguments: Any) -> Any:
        """Replace the meta tensors among arguments by what they hold."""
        leaves, spec = tree_flatten(arguments)
        values = [self.value(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        with _disable_current_modes():
            real = iter(self.replay(values))
        return tree_unflatten([next(real) if isinstance(x, Tensor) else x for x in leaves], spec)

    def _write_down(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        outputs: Any,
        written: list[Tensor],
        draw: Draw | None,
    ) -> None:
        made = [out for out in tree_flatten(outputs)[0] if isinstance(out, Tensor)]
        fresh = [out.untyped_storage()._cdata not in self._storages for out in made]
        changed = {self.value(tensor): tensor for tensor in written}
        if not any(fresh) and not changed:
            return  # a view
        for tensor in made:
            self._keep(tensor)
        named = tree_map(lambda x: self.value(x) if isinstance(x, Tensor) else x, (args, kwargs))
        used = _storages_of(named)
        writes = {value.storage for value in changed}
        blind = set()
        if func.__name__.split(".")[0] in OVERWRITES:
            blind = {v.storage for v, t in changed.items() if _covers_its_storage(t)}
            blind -= _storages_of(named[0][1:])
        makes = tuple(self.value(t) if new else None for t, new in zip(made, fresh, strict=True))
        self.ops.append(
            RecordedOp(
                function=func,
                draw=draw,
                arguments=named[0],
                keywords=named[1],
                makes=makes,
                writes=frozenset(writes | {value.storage for value in makes if value}),
                reads=frozenset(used - blind),
                overwrites=frozenset(blind),
                default_dtype=torch.get_default_dtype(),
            )
        )


def needed_ops(ops: list[RecordedOp], storages: Iterable[int]) -> Iterator[RecordedOp]:
    """Find the ops that decide what storages hold at the end, in their order."""
    contents, existing = set(storages), set(storages)
    needed = []
    for op in reversed(ops):
        made = {value.storage for value in op.makes if value}
        if not (op.writes & contents or made & existing):
            continue
        needed.append(op)
        contents -= op.overwrites | made
        existing -= made
        contents |= op.reads
        existing |= op.reads | op.overwrites
    return reversed(needed)


def bare_storages(ops: Iterable[RecordedOp]) -> frozenset[int]:
    """Find the storages that are made without numbers and never get any, and copies of such."""
    bare: frozenset[int] = frozenset()
    for op in ops:
        name = op.function.__name__.split(".")[0]
        if "empty" in name or (name in COPIES and op.reads <= bare):
            bare |= {value.storage for value in op.makes if value}
        else:
            bare -= op.writes
    return bare


def replay(
    ops: list[RecordedOp], constants: Mapping[int, Tensor], values: list[Value]
) -> list[Tensor]:
    """Run the ops that the values need, on the CPU, each random one from its own state."""
    storages = {}
    wanted = {value.storage for value in values}
    selected = list(needed_ops(ops, wanted))
    for address in wanted.union(*(op.reads for op in selected)) & set(constants):
        storages[address] = constants[address].clone().untyped_storage()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for op in selected:
            _run(op, storages)
    return [value.of(storages[value.storage]) for value in values]


def _run(op: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
    def real(leaf: Any) -> Any:
        return leaf.of(storages[leaf.storage]) if isinstance(leaf, Value) else leaf

    args, kwargs = tree_map(real, (op.arguments, dict(op.keywords)))
    if op.draw is not None:
        op.draw.set(torch.default_generator)
    default = torch.get_default_dtype()
    torch.set_default_dtype(op.default_dtype)
    try:
        outputs = op.function(*args, **_on_cpu(kwargs))
    finally:
        torch.set_default_dtype(default)
    made = [out for out in tree_flatten(outputs)[0] if isinstance(out, Tensor)]
    for value, tensor in zip(op.makes, made, strict=True):
        if value is not None:
            storages[value.storage] = _laid_out_as(value, tensor).untyped_storage()


def _laid_out_as(value: Value, tensor: Tensor) -> Tensor:
    """Copy a tensor whose strides are not those of its recording."""
    if tensor.stride() == value.stride and tensor.storage_offset() == value.offset:
        return tensor
    fresh = torch.empty_strided(value.size, value.stride, dtype=value.dtype)
    return fresh.copy_(tensor)


def _stand_in(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": CPU} if "device" in kwargs else kwargs


def is_recorded(tensor: Tensor) -> bool:
    """Tell the constructor's own tensors from real ones, whatever they pretend to be."""
    return tensor.untyped_storage().device == META


def _asks_for_values(func: Any) -> bool:
    """Tell .item() and equal() from ops that make tensors."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(value.type) for value in returns)


def _takes_a_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Find the arguments that the op's schema says it changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor))


def _storages_of(arguments: Any) -> set[int]:
    return {leaf.storage for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Value)}


def _covers_its_storage(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()
