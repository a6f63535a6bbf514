"""The traced model as immutable data, with one index for questions about it.

The index answers which op makes a tensor, which ops write to its memory, and what depends on what.
No other file decides what a write changes. Tensors may share a storage: if an op writes to one of
them, later reads of all of them see the new values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

from autopar.planner.graph.ops import (
    Buffer,
    Constant,
    FunctionCall,
    GradientUse,
    ModuleCall,
    Op,
    OwnGradient,
    Parameter,
    Tensor,
)

K = TypeVar("K")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Node: TypeAlias = str | int | tuple[str, int]  # a tensor, an op, a state of memory
_NONE = frozenset[int]()


class Index:
    """The index of a graph, stored with the graph; each part is computed on first use."""

    def __init__(
        self,
        ops: tuple[Op, ...],
        tensors: Mapping[str, Tensor],
        calls: Mapping[str, ModuleCall],
        functions: tuple[FunctionCall, ...],
    ) -> None:
        self._ops, self._tensors, self._calls, self._functions = ops, tensors, calls, functions
        self._around: dict[str, tuple[str, ...]] = {}

    # --- tensors ---------------------------------------------------------------------------------

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The position of each op, by name."""
        return MappingProxyType({op.name: at for at, op in enumerate(self._ops)})

    @cached_property
    def made_by(self) -> Mapping[str, Op]:
        """The op that makes a tensor, by the tensor's name; none for parameters, inputs, …"""
        return MappingProxyType({out: op for op in self._ops for out in op.outputs})

    @cached_property
    def readers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that read each tensor, in order, each once."""
        return _gathered((name, op) for op in self._ops for name in dict.fromkeys(op.inputs))

    @cached_property
    def writers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that write to each storage, in order."""
        return _gathered((name, op) for op in self._ops for name in self.written_by(op))

    def made_at(self, name: str) -> int:
        """Return the position of the op that makes a tensor, or -1 if no op does."""
        return self.places[self.made_by[name].name] if name in self.made_by else -1

    def last_read_at(self, name: str) -> int:
        """Return the position of the last op that reads a tensor, or -1 if none does."""
        return max((self.places[op.name] for op in self.readers[name][-1:]), default=-1)

    def is_written_later(self, name: str) -> bool:
        """Whether an op writes to the memory of a tensor after it was made."""
        writers = self.writers[self._tensors[name].storage]
        return any(self.made_at(name) < self.places[op.name] for op in writers[-1:])

    @cached_property
    def lying_in(self) -> Mapping[str, tuple[str, ...]]:
        """The tensors in each storage."""
        return _gathered((one.storage, one.name) for one in self._tensors.values())

    def storages(self, names: Iterable[str]) -> Set[str]:
        """Return the storages of some tensors."""
        return {self._tensors[name].storage for name in names}

    def written_by(self, op: Op) -> Set[str]:
        """Return the storages that an op writes to."""
        return self.storages(op.writes)

    # --- what needs what -------------------------------------------------------------------------

    def needed_for(self, values: Iterable[str], *, without: Iterable[Op] = ()) -> tuple[Op, ...]:
        """Return the ops that determine the final values of some tensors, in order.

        Ops in `without` are left out, and so are those that are needed only by them.
        """
        wanted = set(values)
        written = self.storages(wanted) & self.writers.keys()
        ends = (self._memory(one, self.writers[one][-1]) for one in written)
        hidden = {self.places[op.name] for op in without}
        return self._reached(self._before, wanted.union(ends), hidden)

    def reached_from(self, values: Iterable[str]) -> tuple[Op, ...]:
        """Return the ops that depend on some tensors, in order."""
        return self._reached(self._behind, set(values))

    def _reached(
        self, flow: Mapping[_Node, tuple[_Node, ...]], starts: Set[_Node], hidden: Set[int] = _NONE
    ) -> tuple[Op, ...]:
        """Return the ops that are reached without passing hidden ones, in order."""
        met, waiting = set(starts), list(starts)
        while waiting:
            new = set(flow[waiting.pop()]) - met - hidden
            met |= new
            waiting += new
        return tuple(self._ops[at] for at in sorted(n for n in met if isinstance(n, int)))

    @cached_property
    def _behind(self) -> Mapping[_Node, tuple[_Node, ...]]:
        """What depends on each node directly."""
        return _gathered(self._flow())

    @cached_property
    def _before(self) -> Mapping[_Node, tuple[_Node, ...]]:
        """What each node depends on directly."""
        return _gathered((end, start) for start, end in self._flow())

    def _flow(self) -> Iterator[tuple[_Node, _Node]]:
        """Yield dependencies between ops (by position), tensors (by name) and states of memory.

        A state of memory is a storage with the op that last wrote to it. An op depends on the
        states of its inputs' storages at its position.
        """
        latest = dict[str, tuple[str, int]]()
        for at, op in enumerate(self._ops):
            memory = (latest[one] for one in self.storages(op.inputs) if one in latest)
            made = {one: self._memory(one, op) for one in self.written_by(op)}
            read: tuple[_Node, ...] = (*op.inputs, *memory)
            results: tuple[_Node, ...] = (*op.outputs, *made.values())
            yield from ((one, at) for one in read)
            yield from ((at, one) for one in results)
            yield from ((latest[one], made[one]) for one in made if one in latest)
            lying = {one: self._tensors[one].storage for one in op.outputs}
            yield from ((one, made[own]) for one, own in lying.items() if own in made)
            latest |= made

    def _memory(self, storage: str, writer: Op) -> tuple[str, int]:
        return storage, self.places[writer.name]

    # --- calls -----------------------------------------------------------------------------------

    def around(self, call: str | None) -> tuple[str, ...]:
        """Return a module call and the calls around it, the innermost first."""
        if call is None or call not in self._calls:
            return ()
        if call not in self._around:
            self._around[call] = (call, *self.around(self._calls[call].parent))
        return self._around[call]

    @cached_property
    def ops_in(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops of each call that has any, including those of inner calls, in order.

        Calls are ordered by their first op, each after the one around it.
        """
        return _gathered((call, op) for op in self._ops for call in reversed(self.around(op.call)))

    @cached_property
    def functions(self) -> Mapping[str, tuple[FunctionCall, ...]]:
        """The calls of plain functions, by the name of their first op, the outermost call first."""
        return _gathered((one.ops[0], one) for one in reversed(self._functions))


class _Several(dict[K, tuple[T, ...]]):
    """A dict whose missing keys are empty tuples."""

    def __missing__(self, name: K) -> tuple[T, ...]:
        return ()


def _gathered(pairs: Iterable[tuple[K, T]]) -> Mapping[K, tuple[T, ...]]:
    found: dict[K, list[T]] = {}
    for name, one in pairs:
        found.setdefault(name, []).append(one)
    return MappingProxyType(_Several({name: tuple(own) for name, own in found.items()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A line that torch.compile cannot trace, and the modules (layers) that run it."""

    paths: tuple[str, ...]
    where: str  # file:line
    why: str  # as torch says it


class BackwardFault(StrEnum):
    """Why a backward that the model's code defines may train otherwise on a part of a batch."""

    UNREAD = "unread"  # it cannot be traced
    UNSCALED = "unscaled"  # twice the gradient does not give twice the result


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBackward:
    """A backward of an autograd.Function, of an op of a library, or a hook, with its fault.

    `where` is the line of its definition, or of the op that is at fault; `why` names the reason.
    """

    name: str  # such as "Scale.backward"
    where: str
    fault: BackwardFault
    why: str


@dataclass(frozen=True, kw_only=True)  # no slots, because it carries its index
class Graph:
    """A model with its loss; one trace serves every batch size.

    If the model makes its batch size a constant, at `fixed_at`, the graph serves only the size
    `fixed_batch`. At `lone_at` it decides whether there is a single row: then the graph is
    another. `recomputed_at` is where the model uses torch.utils.checkpoint, `autocast_at`
    where it uses torch.autocast. `devices_meet_at` is where it combines a tensor on the CPU with
    one on another device, which fails. `was_noticed`: the model could see that it was traced, so in
    training it may pass other arguments to its modules, such as no mask.
    """

    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, Constant]
    inputs: tuple[str, ...]
    calls: Mapping[str, ModuleCall]
    loss: str
    fixed_batch: int | None
    fixed_at: str = ""
    lone_at: str = ""
    images: tuple[str, ...] = ()  # inputs that a script may put into channels_last on a GPU
    recomputed_at: str = ""
    autocast_at: str = ""
    devices_meet_at: str = ""
    was_noticed: bool = False
    functions: tuple[FunctionCall, ...] = ()  # an inner call comes before the call around it
    own_gradients: tuple[OwnGradient, ...] = ()
    own_backwards: tuple[OwnBackward, ...] = ()  # those with a fault
    met_backwards: tuple[Op, ...] = ()  # ops of own backwards in which the rows of a batch meet
    # paths of trainable parts in evaluation mode, if the graph would differ in training mode
    in_eval_mode: tuple[str, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()  # of layers, which are therefore not compiled

    def learns(self, op: Op) -> bool:
        """Whether gradients flow through an op: one of its results requires a gradient."""
        return any(self.tensors[name].requires_grad for name in op.outputs)

    @property
    def unread_changes(self) -> Iterator[OwnGradient]:
        """The places where a model changes gradients in a way that no trace shows."""
        changed = (one for one in self.own_gradients if one.use is GradientUse.CHANGED)
        return (one for one in changed if not one.is_read)

    @property
    def tokens_per_row(self) -> int:
        """The number of positions in a row; 1 if no input is a 2-D tensor of integers."""
        for name in self.inputs:
            tensor = self.tensors[name]
            if tensor.dtype.startswith("int") and len(tensor.shape) == 2:
                return tensor.shape[1].at(1)
        return 1

    @cached_property
    def broken(self) -> frozenset[str]:
        """The paths of layers that torch.compile cannot trace whole."""
        return frozenset(path for one in self.breaks for path in one.paths)

    @cached_property
    def index(self) -> Index:
        """The index: the ops that make and read each tensor, and dependencies."""
        return Index(self.ops, self.tensors, self.calls, self.functions)

    @cached_property
    def found(self) -> dict[object, Any]:
        """The results of functions that are `once_per_graph`."""
        return {}


def once_per_graph(find: Callable[[Graph, *Ts], T]) -> Callable[[Graph, *Ts], T]:
    """Cache the result of a function in the graph, which never changes.

    Other arguments (its axes, layers, modules) never change either. They are known by identity, so
    the graph keeps them, too.
    """

    @wraps(find)
    def known(graph: Graph, *others: *Ts) -> T:
        question = find.__module__, find.__qualname__, *map(id, others)
        if question not in graph.found:
            graph.found[question] = find(graph, *others), others
        found: T = graph.found[question][0]
        return found

    return known


def united(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return the first name of each name's set; two names of a pair are in one set."""
    above = {name: name for name in names}

    def top(name: str) -> str:
        while (higher := above.setdefault(name, name)) != name:
            above[name] = name = above[higher]  # the next way is half as long
        return name

    for one, other in pairs:
        above[top(other)] = top(one)
    first = dict[str, str]()
    return {name: first.setdefault(top(name), name) for name in above}


def input_name(key: str, taken: Container[str]) -> str:
    """Return an input's name: its key, or `batch["key"]` if another tensor has this name."""
    return f'batch["{key}"]' if key in taken else key


def batch_key(name: str) -> str:
    """Return the key of an input in the batch, from the input's name."""
    return name.removeprefix('batch["').removesuffix('"]')


def graph_hash(graph: Graph) -> str:
    """Return a hash (64 hexadecimal digits) of what a graph computes, without source positions."""
    digest = hashlib.sha256()
    for op in graph.ops:
        computed = (op.name, op.target, op.arguments, op.outputs, op.call, op.grad_enabled)
        digest.update(repr((computed, op.writes)).encode(errors="surrogatepass"))
    calls = [replace(one, spans=()) for one in graph.calls.values()]
    functions = [replace(one, spans=()) for one in graph.functions]
    named: tuple[Mapping[str, object], ...] = (graph.tensors, graph.constants)
    rest = (calls, functions, graph.buffers, graph.inputs, graph.loss, graph.fixed_batch)
    parameters = [(one.name, one.aliases, one.shape, one.trainable) for one in graph.parameters]
    everything = (parameters, *(list(one.values()) for one in named), rest)
    digest.update(repr(everything).encode(errors="surrogatepass"))
    return digest.hexdigest()
