"""Reads the calls of a graph as a tree, and answers questions about the source of forwards."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from autopar.codegen.forward.reading.author_names import author_names, parsed
from autopar.planner.graph.graph import Graph, once_per_graph
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

_Place = tuple[int, int]  # line, column


def checks_sizes(source: str) -> bool:
    """Whether a forward reads sizes and may raise an error."""
    raises = re.search(r"^\s*(raise|assert)\b", source, flags=re.M) is not None
    return raises and re.search(r"\.(shape|size)\b|\blen\(", source) is not None


def branches_in_training(source: str) -> bool:
    """Whether a forward has an `if self.training`.

    Libraries' `if self.training and self.gradient_checkpointing` does not count.
    """
    nodes = ast.walk(parsed(source))
    tests = (ast.unparse(node.test) for node in nodes if isinstance(node, ast.If))
    return any("self.training" in test and "checkpoint" not in test for test in tests)


def keeps_state(source: str) -> bool:
    """Whether a forward reads an attribute before it sets it, and so depends on earlier calls."""
    tree = parsed(source)
    first_set: dict[str, _Place] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _attributes(node.target, ast.Store):
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name, _ in _attributes(node, ast.Store):
                end = (node.end_lineno or 0, node.end_col_offset or 0)
                first_set[name] = min(end, first_set.get(name, end))
    return any(
        name in first_set and place < first_set[name] for name, place in _attributes(tree, ast.Load)
    )


def left_on_others(sources: Iterable[str], called: Set[str]) -> frozenset[str]:
    """Return the attributes that classes, outside of constructors, set on other objects.

    Only methods that a step may run count: those that a forward names, directly or through other
    methods, those that a constructor keeps, as hooks, and those in `called`. transformers'
    `set_input_embeddings`, for example, does not count, because no step runs it.
    """
    methods: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for source in sources:
        for method in _methods(source):
            methods[method.name].append(method)
    later = called | _kept_by_constructors(methods)
    methods.pop(_CONSTRUCTOR, None)
    waiting = [name for name in methods if name in later or name.startswith(("forward", "__"))]
    reached, found = set(waiting), set[str]()
    while waiting:
        name = waiting.pop()
        for node in (node for method in methods[name] for node in ast.walk(method)):
            if isinstance(node, ast.Attribute) and node.attr in methods.keys() - reached:
                reached.add(node.attr)
                waiting.append(node.attr)
            if isinstance(node, ast.Attribute) and _is_set_on_other(node):
                found.add(node.attr)
    return frozenset(found)


def _kept_by_constructors(methods: Mapping[str, Sequence[ast.FunctionDef]]) -> set[str]:
    """Return the attributes that constructors name without calling them, such as hooks.

    Methods that a constructor calls are searched in the same way.
    """
    names, kept = [_CONSTRUCTOR], set[str]()
    for name in names:  # the loop appends to it
        for method in methods[name]:
            nodes = list(ast.walk(method))
            inner = [node for node in nodes if isinstance(node, (ast.Lambda, ast.FunctionDef))]
            later = {
                node for function in inner if function is not method for node in ast.walk(function)
            }
            called = {node.func for node in nodes if isinstance(node, ast.Call)} - later
            attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
            kept |= {node.attr for node in attributes if node not in called}
            found = {node.attr for node in attributes if node in called}
            names += (found & methods.keys()).difference(names)
    return kept


def _is_set_on_other(node: ast.Attribute) -> bool:
    is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node.ctx, ast.Store) and not is_own


def own_attributes(source: str) -> frozenset[str]:
    """Return the attributes of `self` that a class reads outside of its constructor."""
    loads = (_attributes(function, ast.Load) for function in _run_later(source))
    return frozenset(name for found in loads for name, _ in found)


def remembers(source: str) -> bool:
    """Whether methods of a class, except its constructor, set an attribute that others read."""
    stores = (_attributes(function, ast.Store) for function in _run_later(source))
    return not own_attributes(source).isdisjoint(name for found in stores for name, _ in found)


_CONSTRUCTOR = "__init__"


def _run_later(source: str) -> Iterator[ast.FunctionDef]:
    """Return the methods of a class except its constructor."""
    return (method for method in _methods(source) if method.name != _CONSTRUCTOR)


def _methods(source: str) -> Iterator[ast.FunctionDef]:
    for statement in parsed(source).body[:1]:
        for inner in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                yield inner


def _attributes(tree: ast.AST, context: type[ast.expr_context]) -> list[tuple[str, _Place]]:
    return [
        (node.attr, (node.lineno, node.col_offset))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


def numbers_read(source: str) -> frozenset[str]:
    """Return the nested attributes that a class reads: "config.eps" for `self.config.eps`."""
    nodes = ast.walk(parsed(source))
    texts = (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(text[5:] for text in texts if re.fullmatch(r"self(\.[a-z]\w*){2,}", text))


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


def items_of(value: Value, place: str) -> Iterator[tuple[str, Value]]:
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
    for inner, one in items_of(value, place):
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
    """The tree of a graph's calls: the calls around and inside each call, and its ops.

    Some tensors reach a call's code although they are no arguments, nor results of inner calls:
    other code has stored them on a module, by a hook, or in shared objects.
    """

    graph: Graph
    chains: Mapping[str, tuple[str, ...]]  # outermost first: (LOSS, ROOT, "h.0", "h.0.attn", …)
    inside: Mapping[str, tuple[str, ...]]  # the calls directly in each call
    ops: Mapping[str, tuple[Op, ...]]  # of a call, including inner calls
    names: Mapping[str, Sequence[tuple[str, str]]]  # see author_names
    entering: Mapping[str, frozenset[str]]  # the tensors among the arguments of each call
    leaving: Mapping[str, frozenset[str]]  # the tensors in the result of each call
    unpassed: Mapping[str, frozenset[str]]  # what each call reads, and no argument passes
    hidden: Mapping[str, frozenset[str]]  # what each call's own code uses so, made by inner calls

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

    def is_of_loss(self, op: Op) -> bool:
        """Whether the loss function runs an op: itself, or by an autograd Function."""
        return ROOT not in self.chains[op.call]


@once_per_graph
def call_tree(graph: Graph) -> CallTree:
    """Return the tree of a graph's calls."""
    index = graph.index
    outer = (around for call in graph.calls for around in reversed(index.around(call)))
    chains = {call: (LOSS, *reversed(index.around(call))) for call in (LOSS, *index.ops_in, *outer)}
    children: dict[str, list[str]] = {call: [] for call in chains}
    for call, around in chains.items():
        if len(around) > 1:
            children[around[-2]].append(call)
    ops = {LOSS: graph.ops, **index.ops_in}
    entering = {call: _entering(call, graph) for call in chains}
    made = {call: frozenset(refs(one.result)) for call, one in graph.calls.items()}
    leaving = {**made, LOSS: frozenset((graph.loss,))}
    unpassed, hidden = {}, {}
    for call in chains:
        own = [op for op in ops.get(call, ()) if op.call == call]
        unpassed[call] = frozenset(_unpassed(ops.get(call, ()), graph)) - entering[call]
        inside = children[call]
        used = leaving[call].union(*(op.inputs for op in own), *(entering[one] for one in inside))
        given = entering[call].union(*(op.outputs for op in own), *(leaving[one] for one in inside))
        missing = used - given
        results = (name for op in ops.get(call, ()) for name in op.outputs)
        hidden[call] = missing.intersection(results) if missing else missing
    return CallTree(
        graph=graph,
        chains=MappingProxyType(chains),
        inside=MappingProxyType({call: tuple(own) for call, own in children.items()}),
        ops=MappingProxyType(ops),
        names=author_names(graph),
        entering=MappingProxyType(entering),
        leaving=MappingProxyType(leaving),
        unpassed=MappingProxyType(unpassed),
        hidden=MappingProxyType(hidden),
    )


def _entering(call: str, graph: Graph) -> frozenset[str]:
    if call == LOSS:
        return frozenset(graph.inputs)
    record = graph.calls[call]
    return frozenset(refs((record.arguments, tuple(value for _, value in record.keywords))))


def _unpassed(ops: Sequence[Op], graph: Graph) -> Iterator[str]:
    """Yield the activations and inputs that ops read and do not make.

    Parameters, buffers and constants do not count: every rank with the module has them.
    """
    made = {name for op in ops for name in op.outputs}
    kept = (TensorOrigin.PARAMETER, TensorOrigin.BUFFER, TensorOrigin.CONSTANT)
    for name in {name for op in ops for name in op.inputs} - made:
        if graph.tensors[graph.tensors[name].storage].origin not in kept:
            yield name


def common(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common beginning of some chains, outermost first."""
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*chains, strict=False))
    return tuple(step[0] for step in steps)
