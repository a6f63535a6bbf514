"""The traced model as plain immutable data, with the one index that answers questions about it.

Answers questions about a graph: who makes a tensor, who writes to its memory, what needs what.

This is the one idea of writes and aliases. A tensor lies in a storage, perhaps with others; an op
that writes to one of them writes to the storage, and what reads any of them later reads that too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import networkx as nx

from autopar.planner.graph.ops import (
    Buffer,
    Constant,
    FunctionCall,
    ModuleCall,
    Op,
    OwnGradient,
    Parameter,
    Tensor,
)

T = TypeVar("T")


class Index:
    """The index of one graph, which carries it; each part is made when it is first asked for."""

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
        """The place of each op, by its name."""
        return MappingProxyType({op.name: at for at, op in enumerate(self._ops)})

    @cached_property
    def made_by(self) -> Mapping[str, Op]:
        """The op that makes each tensor that an op makes."""
        return MappingProxyType({out: op for op in self._ops for out in op.outputs})

    @cached_property
    def readers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that read each tensor, each once, in order."""
        return _gathered((name, op) for op in self._ops for name in dict.fromkeys(op.inputs))

    @cached_property
    def writers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that write to each storage, in order."""
        return _gathered((name, op) for op in self._ops for name in self.written_by(op))

    def made_at(self, name: str) -> int:
        """Return the place of the op that makes a tensor, -1 where it comes from outside."""
        return self.places[self.made_by[name].name] if name in self.made_by else -1

    def last_read_at(self, name: str) -> int:
        """Return the place of the last op that reads a tensor, -1 where none does."""
        return max((self.places[op.name] for op in self.readers[name][-1:]), default=-1)

    def is_written_later(self, name: str) -> bool:
        """Whether an op writes to the memory of a tensor after that was made."""
        writers = self.writers[self._tensors[name].storage]
        return any(self.made_at(name) < self.places[op.name] for op in writers[-1:])

    @cached_property
    def lying_in(self) -> Mapping[str, tuple[str, ...]]:
        """The tensors that lie in each storage."""
        return _gathered((one.storage, one.name) for one in self._tensors.values())

    def storages(self, names: Iterable[str]) -> Set[str]:
        """Return the storages that some tensors lie in."""
        return {self._tensors[name].storage for name in names}

    def written_by(self, op: Op) -> Set[str]:
        """Return the storages that an op writes to."""
        return self.storages(op.writes)

    # --- what needs what -------------------------------------------------------------------------

    def needed_for(self, values: Iterable[str], *, without: Iterable[Op] = ()) -> tuple[Op, ...]:
        """Return the ops that make some tensors as they are in the end, in order.

        Ops `without` are left out, and so is what is needed for these alone.
        """
        wanted = set(values)
        written = self.storages(wanted) & self.writers.keys()
        ends = (self._memory(one, self.writers[one][-1]) for one in written)
        hidden = [self.places[op.name] for op in without]
        flow = nx.restricted_view(self._flow, hidden, ()) if hidden else self._flow
        return self._met(flow.reverse(copy=False), wanted.union(ends))

    def reached_from(self, values: Iterable[str]) -> tuple[Op, ...]:
        """Return the ops that depend on some tensors, in order."""
        return self._met(self._flow, set(values))

    def _met(self, flow: nx.DiGraph, starts: Set[Any]) -> tuple[Op, ...]:
        met = chain.from_iterable(nx.bfs_layers(flow, starts))
        return tuple(self._ops[at] for at in sorted(n for n in met if isinstance(n, int)))

    @cached_property
    def _flow(self) -> nx.DiGraph:
        """What follows from what: ops by their places, tensors by name, memory by its last writer.

        An op reads the memory of its inputs as the last writer before it has left it.
        """
        flow, latest = nx.DiGraph(), dict[str, tuple[str, int]]()
        flow.add_nodes_from(self._tensors)
        for at, op in enumerate(self._ops):
            memory = {one: latest[one] for one in self.storages(op.inputs) if one in latest}
            made = {one: self._memory(one, op) for one in self.written_by(op)}
            flow.add_edges_from((one, at) for one in (*op.inputs, *memory.values()))
            flow.add_edges_from((at, one) for one in (*op.outputs, *made.values()))
            flow.add_edges_from((latest[one], made[one]) for one in made if one in latest)
            lying = {one: self._tensors[one].storage for one in op.outputs}
            flow.add_edges_from((one, made[own]) for one, own in lying.items() if own in made)
            latest |= made
        return flow

    def _memory(self, storage: str, writer: Op) -> tuple[str, int]:
        return storage, self.places[writer.name]

    # --- calls -----------------------------------------------------------------------------------

    def around(self, call: str | None) -> tuple[str, ...]:
        """Return a call of a module and the calls around it, the innermost first."""
        if call is None or call not in self._calls:
            return ()
        if call not in self._around:
            self._around[call] = (call, *self.around(self._calls[call].parent))
        return self._around[call]

    @cached_property
    def ops_in(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops of each call that has any, with those of the calls inside it, in order.

        Calls come as they begin to compute, each behind the one around it.
        """
        return _gathered((call, op) for op in self._ops for call in reversed(self.around(op.call)))

    @cached_property
    def functions(self) -> Mapping[str, tuple[FunctionCall, ...]]:
        """The calls of plain functions by their first ops, the outer ones first."""
        return _gathered((one.ops[0], one) for one in reversed(self._functions))


class _Several(dict[str, tuple[T, ...]]):
    """What belongs to each name: nothing where the name has nothing."""

    def __missing__(self, name: str) -> tuple[T, ...]:
        return ()


def _gathered(pairs: Iterable[tuple[str, T]]) -> Mapping[str, tuple[T, ...]]:
    found: dict[str, list[T]] = {}
    for name, one in pairs:
        found.setdefault(name, []).append(one)
    return MappingProxyType(_Several({name: tuple(own) for name, own in found.items()}))


@dataclass(frozen=True, kw_only=True)  # without slots: it carries its index
class Graph:
    """A model with its loss, traced once for every batch size.

    `fixed_batch` is the one batch size of a model that takes it for a constant, `fixed_at` where.
    `recomputed_at` is where a model has torch compute something again (torch.utils.checkpoint),
    `autocast_at` where it chooses a precision of its own (torch.autocast), `devices_meet_at` where
    it creates a tensor on the CPU that its own device would not take.
    A model that noticed the trace may hand its modules something else in training: no mask, say.
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
    recomputed_at: str = ""
    autocast_at: str = ""
    devices_meet_at: str = ""
    was_noticed: bool = False
    functions: tuple[FunctionCall, ...] = ()  # a call inside another one stands before that
    own_gradients: tuple[OwnGradient, ...] = ()
    in_eval_mode: tuple[str, ...] = ()  # parts that learn, and compute otherwise in training

    def learns(self, op: Op) -> bool:
        """Whether gradients flow through what an op makes."""
        return any(self.tensors[name].requires_grad for name in op.outputs)

    @property
    def tokens_per_row(self) -> int:
        """The positions of a row of text; 1 where no input is a sequence of numbers."""
        for name in self.inputs:
            tensor = self.tensors[name]
            if tensor.dtype.startswith("int") and len(tensor.shape) == 2:
                return tensor.shape[1].at(1)
        return 1

    @cached_property
    def index(self) -> Index:
        """Who makes and reads what, and what needs what."""
        return Index(self.ops, self.tensors, self.calls, self.functions)


def input_name(key: str, taken: Container[str]) -> str:
    """Return the name of the tensor that the batch has under a key, which a parameter may have."""
    return f'batch["{key}"]' if key in taken else key


def batch_key(name: str) -> str:
    """Return the key of an input in the batch."""
    return name.removeprefix('batch["').removesuffix('"]')
