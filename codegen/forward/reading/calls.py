"""Reads the calls of a graph as a tree, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.forward.reading.author_names import author_names
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import (
    LOSS_CALL,
    Fields,
    Mapped,
    NamedFields,
    Op,
    Ref,
    TensorOrigin,
    Value,
    refs,
)


def is_mapping(value: Value) -> bool:
    """Whether a recorded value is made of pairs: a dict, or an object with fields."""
    return isinstance(value, (Mapped, Fields)) and bool(value)


def as_tuple(value: Value) -> Value:
    """Return a namedtuple as a plain tuple, and any other value as it is."""
    return tuple(item for _, item in pairs(value)) if isinstance(value, NamedFields) else value


def pairs(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the items of a dict, or the fields of an object."""
    assert isinstance(value, tuple)
    for item in value:
        assert isinstance(item, tuple)
        key, inner = item
        yield str(key), inner


def held(value: Value, place: str) -> Iterator[tuple[str, Value]]:
    """Yield the items of a container or an object, each with its expression.

    `place` is the expression of the value itself.
    """
    if is_mapping(value):
        for key, inner in pairs(value):
            yield f"{place}.{key}" if isinstance(value, Fields) else f'{place}["{key}"]', inner
    elif isinstance(value, tuple):
        for number, inner in enumerate(value):
            yield f"{place}[{number}]", inner


def leaves(value: Value, place: str) -> Iterator[tuple[str, Value]]:
    """Yield the nested items of a value, each with its expression."""
    if not isinstance(value, tuple):
        yield place, value
    for inner, one in held(value, place):
        yield from leaves(one, inner)


def is_plain(value: Value) -> bool:
    """Whether a result is made of tensors, numbers and tuples only."""
    if isinstance(value, tuple):
        return not is_mapping(value) and all(map(is_plain, value))
    return value is None or isinstance(value, (Ref, bool, int, float, complex))


LOSS = LOSS_CALL
ROOT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTree:
    """The calls around each call, and the ops in it."""

    graph: Graph
    chains: Mapping[str, tuple[str, ...]]  # outermost first: (LOSS, ROOT, "h.0", "h.0.attn", …)
    inside: Mapping[str, tuple[str, ...]]  # the calls directly in each call
    ops: Mapping[str, tuple[Op, ...]]  # of a call, including inner calls
    names: Mapping[str, Sequence[tuple[str, str]]]  # of tensors, with the call whose code gives it

    def chain(self, op: Op) -> tuple[str, ...]:
        """Return the calls around an op, outermost first."""
        return self.chains[op.call]

    def names_in(self, call: str, tensor: str, *, without: str | None = None) -> tuple[str, ...]:
        """Return a tensor's names in the code of a call and its inner calls, except `without`.

        The names of the outermost code come first.
        """
        chains = (
            (name, self.chains[giver]) for giver, name in reversed(self.names.get(tensor, ()))
        )
        return tuple(dict.fromkeys(n for n, own in chains if call in own and without not in own))

    def parent(self, call: str) -> str:
        """Return the call around a call."""
        return self.chains[call][-2]

    def is_inside(self, op: Op, call: str) -> bool:
        """Whether an op runs in a call or in a call inside it."""
        return call in self.chains[op.call]

    def entering(self, call: str) -> frozenset[str]:
        """Return the tensors among the arguments of a call."""
        if call == LOSS:
            return frozenset(self.graph.inputs)
        record = self.graph.calls[call]
        keywords = tuple(value for _, value in record.keywords)
        return frozenset(refs((record.arguments, keywords)))

    def untold(self, call: str) -> frozenset[str]:
        """Return the activations and inputs that a call reads although they are no arguments.

        Other code has stored them on a module or in shared objects. Parameters, buffers and
        constants do not count: every rank with the module has them.
        """
        tensors = self.graph.tensors
        made = {name for op in self.ops.get(call, ()) for name in op.outputs}
        read = {name for op in self.ops.get(call, ()) for name in op.inputs}
        kept = (TensorOrigin.PARAMETER, TensorOrigin.BUFFER, TensorOrigin.CONSTANT)
        return frozenset(
            name
            for name in read - made - self.entering(call)
            if tensors[tensors[name].storage].origin not in kept
        )

    def hidden(self, call: str) -> frozenset[str]:
        """Return the tensors that a call's code uses although no inner call returns them.

        An inner call has stored them on a module, by a hook, or in shared objects.
        """
        own = [op for op in self.ops.get(call, ()) if op.call == call]
        inside = self.inside.get(call, ())
        available = self.entering(call).union(
            *(op.outputs for op in own), *map(self.leaving, inside)
        )
        used = self.leaving(call).union(*(op.inputs for op in own), *map(self.entering, inside))
        missing = used - available
        made = (name for op in self.ops.get(call, ()) for name in op.outputs)
        return missing.intersection(made) if missing else missing

    def leaving(self, call: str) -> frozenset[str]:
        """Return the tensors in the result of a call."""
        return frozenset(
            (self.graph.loss,) if call == LOSS else refs(self.graph.calls[call].result)
        )


def call_tree(graph: Graph) -> CallTree:
    """Return the tree of a graph's calls."""
    index = graph.index
    outer = (around for call in graph.calls for around in reversed(index.around(call)))
    chains = {call: (LOSS, *reversed(index.around(call))) for call in (LOSS, *index.ops_in, *outer)}
    children: dict[str, list[str]] = {call: [] for call in chains}
    for call, around in chains.items():
        if len(around) > 1:
            children[around[-2]].append(call)
    return CallTree(
        graph=graph,
        chains=MappingProxyType(chains),
        inside=MappingProxyType({call: tuple(own) for call, own in children.items()}),
        ops=MappingProxyType({LOSS: graph.ops, **index.ops_in}),
        names=author_names(graph),
    )


def common(chains: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common beginning of some chains, outermost first."""
    first, *others = list(chains)
    length = len(first)
    for other in others:
        length = min(length, len(other))
        while first[:length] != other[:length]:
            length -= 1
    return first[:length]
