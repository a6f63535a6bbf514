"""Records the tensor ops of a model's constructor on the meta device.

There are three kinds of tensors. Recorded tensors are made by the constructor's ops; they have no
memory here, and would be on the CPU in plain PyTorch. Real tensors come from elsewhere: files,
arrays, lists of numbers. Bare tensors are put on meta by the constructor itself; plain PyTorch has
no values for them either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import total_ordering
from threading import RLock, get_ident, local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.runtime.tensor.shards import has_own_ops, has_plain_memory
from autopar.runtime.weights.plain_model import Draws, GeneratorState, is_default, is_random
from autopar.runtime.weights.recording.constants import stand_in_of
from autopar.runtime.weights.recording.recorded_ops import (
    OVERWRITES,
    History,
    RecordedOp,
    UnrecordableError,
    Value,
    asks_for_values,
    generator_kept,
    is_written,
    on_cpu,
    plainly,
    storages_of,
    takes,
    written_by,
)

META = torch.device("meta")
NO_DATA = "Cannot copy out of meta tensor; no data!"  # torch's own text
MADE_LIKE = ("_like", "new_")  # parts of names of ops that do not read their tensor's values
FILLS = {"normal_", "uniform_", "fill_", "zero_"}
# the most ops that are replayed: the first number, plus the second for each recorded op
MOST_REPLAYED, MOST_REPLAYED_EACH = 10_000, 20
FROM_ELSEWHERE = {torch.ops.aten.from_file.default}  # ops without inputs that make real tensors


class ConstructorRecording:
    """The ops of a constructor, and the values of its tensors."""

    def __init__(self, seed: int) -> None:
        self.draws = Draws(seed)
        self.history = History()
        self.failure: Exception | None = None  # the constructor may have caught it
        self.is_over = False
        self.adopted: list[Tensor] = []  # real tensors that became recorded, or the reverse
        self._ops_replayed = 0
        self._lock = RLock()
        self._thread = get_ident()
        self._asked = local()
        self._numbers: dict[int, int] = {}  # storage numbers, by address
        # keeps storages alive, so that no address is reused
        self._storages: list[torch.UntypedStorage] = []
        self._lent: dict[int, weakref.ref[Any]] = {}  # arrays that share the values of a storage

    def is_recorded(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by the constructor and would have values in plain PyTorch."""
        storage = _storage(tensor)
        return storage is not None and self.holds(storage)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage belongs to a recorded tensor."""
        return storage._cdata in self._numbers

    def is_bare(self, tensor: Tensor) -> bool:
        """Whether the constructor itself put a tensor on meta."""
        return tensor.is_meta and not self.is_recorded(tensor)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on meta and record it; if its tensors are real, run it without recording."""
        if self.is_over:
            return func(*args, **kwargs)
        try:
            with self._lock:
                return self._run(func, args, kwargs)
        except Exception as error:
            if not str(error).startswith(NO_DATA):  # plain PyTorch raises this as well
                self.failure = error
            raise

    @property
    def asks_for_meta(self) -> bool:
        """Whether the constructor asks, in this thread, for tensors on the meta device."""
        return getattr(self._asked, "is_meta", False)

    @contextmanager
    def asked(self, is_meta: bool) -> Iterator[None]:
        """Note whether the call inside asks for meta tensors, so that its ops make them on meta."""
        before, self._asked.is_meta = self.asks_for_meta, is_meta
        try:
            yield
        finally:
            self._asked.is_meta = before

    def initialise(self, function: Any, tensor: Tensor, *args: Any, generator: Any) -> None:
        """Record a random initialiser without running it."""
        with self._lock:
            draw = self._drawn(function, (tensor, *args), {"generator": generator})
            self._write_down(function, (tensor, *args), {}, outputs=tensor, draw=draw)

    def value(self, tensor: Tensor) -> Value:
        """Return the Value of a recorded tensor; a real tensor becomes a constant first."""
        if tensor.is_conj() or tensor.is_neg():
            raise UnrecordableError("a conjugated view of a tensor")
        tensor = self.on_meta(tensor)
        number = self._numbers[tensor.untyped_storage()._cdata]
        offset = int(tensor.storage_offset())
        return Value(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def on_meta(self, leaf: Any) -> Any:
        """Return a meta tensor in place of a real one, and keep its values; return others as is."""
        if not isinstance(leaf, Tensor) or self.is_recorded(leaf) or leaf.is_meta:
            return leaf
        with plainly(), self._lock, torch.no_grad():
            constants = self.history.constants
            known = constants.known(leaf)
            stand_in = stand_in_of(leaf)
            if known is None:
                constants.take(leaf, self._keep(stand_in), stand_in)
                return stand_in
            return stand_in.set_(self._storages[known], 0, stand_in.shape, stand_in.stride())

    def real(self, arguments: Any) -> Any:
        """Return arguments with real tensors in place of the recorded tensors."""
        leaves = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        recorded = {id(one): one for one in leaves if self.is_recorded(one)}
        if not recorded:
            return arguments
        with self._lock:
            held = self._replayed([self.value(one) for one in recorded.values()])
        by_id = dict(zip(recorded, held, strict=True))
        return tree_map(lambda one: by_id.get(id(one), one), arguments)

    def _replayed(self, values: list[Value]) -> list[Tensor]:
        self._ops_replayed += len(self.history.ops_for(values))
        if self._ops_replayed > MOST_REPLAYED + MOST_REPLAYED_EACH * len(self.history.ops):
            raise UnrecordableError("values are read too often: each read computes them anew")
        return self.history.replay(values)

    def lend(self, tensor: Tensor, shown: Any) -> Any:
        """Remember an array with a tensor's values: the tensor must not change while it lives."""
        self._lent[self.value(tensor).storage] = weakref.ref(shown)
        return shown

    def address(self, storage: torch.UntypedStorage, offset_bytes: int = 0) -> Address:
        """Return the address at which a storage's values would be."""
        return Address(self._numbers[storage._cdata] + 1, offset_bytes, self)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(has_own_ops, given)) or func.__name__.startswith("quantize_"):
            raise UnrecordableError(f"{func} of a {type(given[0]).__name__}")
        recorded = [tensor for tensor in given if self.is_recorded(tensor)]
        bare = [tensor for tensor in given if self.is_bare(tensor)]
        if bare and recorded:
            if given[0] is bare[0] and func.__name__.startswith("copy_."):
                return func(*args, **kwargs)  # reads no values
            raise UnrecordableError(f"{func} of a tensor on meta and one that is not")
        device = torch.device(kwargs.get("device") or ("meta" if bare else "cpu"))
        if device.type == "meta" and (bare or self.asks_for_meta):
            return func(*args, **kwargs)
        if bare and not any(part in func.__name__ for part in MADE_LIKE):
            raise NotImplementedError(NO_DATA)
        is_real = bool(given or func in FROM_ELSEWHERE) and not recorded and not bare
        if is_real and not self._is_lazy(func, given):
            return self._run_for_real(func, args, kwargs)
        return self._record(func, args, kwargs, is_made=not given)

    def _is_lazy(self, func: Any, given: list[Tensor]) -> bool:
        """Whether an op makes a tensor from a mapped file, so that it is recorded and not run."""
        returns, arguments = func._schema.returns, func._schema.arguments
        makes = any("Tensor" in str(one.type) and one.alias_info is None for one in returns)
        if not makes or any(is_written(one) for one in arguments):
            return False
        with plainly():
            return any(map(self.history.constants.is_mapped, given))

    def _run_for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op with real values, without recording it."""
        written = list(written_by(func, args, kwargs))
        if any(map(self.is_recorded, written)):
            raise UnrecordableError(f"{func} writes to real tensors and to others")
        with plainly():
            self.history.constants.before_writing(written)
        args, kwargs = self.real(args), self.real(kwargs)
        if not is_random(func):
            return func(*args, **kwargs)
        self._check_thread()
        self.settle()
        with self.draws.one(kwargs.get("generator")):
            return func(*args, **kwargs)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_made: bool
    ) -> Any:
        written = list(written_by(func, args, kwargs))
        if asks_for_values(func) or not all(map(self.is_recorded, written)):
            return self._run_for_real(func, args, kwargs)
        args, kwargs = tree_map(self.on_meta, (args, kwargs))
        if "device" in kwargs or (is_made and takes(func, "device")):
            kwargs = {**kwargs, "device": META}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        draw = None
        if is_random(func):
            draw = self._drawn(func, args, kwargs)
            if "generator" in kwargs:
                kwargs = {**kwargs, "generator": None}  # the draw has the generator's state
        outputs = self._outputs(func, args, kwargs, written=written)
        self._write_down(func, args, kwargs, outputs=outputs, draw=draw)
        return outputs

    def _outputs(self, func: Any, args: Any, kwargs: Any, *, written: list[Tensor]) -> Any:
        if func.__name__.split(".")[0] in FILLS and args[0].is_floating_point():
            return args[0]  # not run: torch's code for some of these takes a millisecond
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # torch cannot infer the result without values
            if written:
                raise
        real = self.real(args), on_cpu(self.real(kwargs))
        with plainly(), generator_kept():
            return tree_map(_stand_in, func(*real[0], **real[1]))

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GeneratorState:
        """Return the state of an op's generator before the op, and advance the generator."""
        self._check_thread()
        generator = kwargs.get("generator")
        if generator is None or is_default(generator):
            return self.draws.noted(len(self.history.ops))
        draw = GeneratorState(state=generator.get_state())
        real = self.real(args), on_cpu(self.real(kwargs))
        with plainly(), torch.no_grad():
            func(*real[0], **real[1])
        return draw

    def settle(self) -> None:
        """Set the default generator to its state after the draws that were recorded but not run."""
        behind = self.draws.behind()
        if behind is not None:
            torch.default_generator.set_state(self.history.state_behind(behind))

    def _check_thread(self) -> None:
        if get_ident() != self._thread:
            raise UnrecordableError("random numbers are drawn in another thread")

    def _check_lent(self, storages: Iterable[int]) -> None:
        for storage in storages:
            lent = self._lent.get(storage)
            if lent is not None and lent() is not None:
                raise UnrecordableError("it changes a tensor while an array shows its values")

    def _write_down(
        self, func: Any, args: Any, kwargs: Any, *, outputs: Any, draw: GeneratorState | None
    ) -> None:
        written = list(written_by(func, args, kwargs))
        made = [out for out in tree_leaves(outputs) if isinstance(out, Tensor)]
        fresh = [not self.is_recorded(out) for out in made]
        changed = {self.value(tensor): tensor for tensor in written}
        if not any(fresh) and not changed:
            return  # a view
        for tensor in made:
            _check_memory(tensor)
            self._keep(tensor)
        writes = {value.storage for value in changed}
        self._check_lent(writes)
        named = tree_map(self._named, (args, kwargs))
        blind = set()
        if func.__name__.split(".")[0] in OVERWRITES:
            blind = {v.storage for v, t in changed.items() if _covers_its_storage(t)}
            blind -= storages_of(named[0][1:])
        makes = tuple(self.value(t) if new else None for t, new in zip(made, fresh, strict=True))
        self.history.add(
            RecordedOp(
                function=func,
                draw=draw,
                arguments=named[0],
                keywords=named[1],
                makes=makes,
                writes=frozenset(writes | {value.storage for value in makes if value}),
                reads=frozenset(storages_of(named) - blind),
                overwrites=frozenset(blind),
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _named(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, Tensor) and self.is_recorded(leaf) else leaf

    def _keep(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return self._numbers[storage._cdata]


@total_ordering
class Address:
    """The address that a recorded tensor would have: it can be compared and shifted, not read."""

    def __init__(self, storage: int, offset_bytes: int, recording: ConstructorRecording) -> None:
        self._place = (storage << 48) + offset_bytes
        self._recording = recording

    def __hash__(self) -> int:
        return hash(self._place)

    def __eq__(self, other: object) -> bool:
        return self._place == getattr(other, "_place", other)

    def __lt__(self, other: Any) -> bool:
        return bool(self._place < getattr(other, "_place", other))

    def __add__(self, offset_bytes: int) -> Address:
        return Address(0, self._place + offset_bytes, self._recording)

    def __sub__(self, other: Any) -> Any:
        return self._place - other._place if isinstance(other, Address) else self + -other

    def __index__(self) -> int:
        self._recording.failure = UnrecordableError("the address of a tensor is used as a number")
        raise self._recording.failure


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that lets a recording run the ops of one thread."""

    def __init__(self, recording: ConstructorRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for the first op, which takes half a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        return self._recording.run(func, args, kwargs or {})


def _stand_in(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    _check_memory(result)
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META)


def _check_memory(made: Tensor) -> None:
    if not has_plain_memory(made):
        raise UnrecordableError(f"a {type(made).__name__} of {made.layout} and {made.dtype}")


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or None for sparse tensors and wrappers."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters of lazy modules would raise
        return tensor.untyped_storage() if has_plain_memory(tensor) else None


def _covers_its_storage(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()
