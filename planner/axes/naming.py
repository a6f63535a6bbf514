"""Gives axes the names that people use, from where they occur."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.planner.axes.unify import Unifier
from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin
from autopar.planner.rules.rule import Rule
from autopar.planner.rules.signature import Signature
from autopar.planner.rules.terms import Concat, Dim, Leaf, Product, leaves

# Which name wins where several are proposed: what an axis is to the batch, to attention, to the
# vocabulary says more than that a convolution or a norm saw it.
_RANKS = {
    "batch": 100,
    "seq": 90,
    "height": 88,
    "width": 88,
    "heads": 80,
    "kv_heads": 80,
    "group": 80,
    "head_dim": 80,
    "vocab": 70,
    "embed": 65,
    "channels": 60,
    "experts": 55,
    "classes": 62,
    "positions": 35,
    "ffn": 10,
}
# Features laid end to end are features each; half a head_dim is no head_dim.
_MADE_OF_ALIKE = ("channels", "embed")
_WEAK = 30  # how much a name loses where it is only likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A name proposed for a dim, and how sure it is."""

    dim: Dim
    name: str
    rank: int


def hints_of(
    op: Op, rule: Rule, signature: Signature, letters: Mapping[str, Dim], graph: Graph
) -> Iterator[Hint]:
    """Yield the names that one op proposes for its letters."""
    if not rule.names:
        return
    has_parameter = any(
        graph.tensors[root].origin is Origin.PARAMETER for root in graph.index.storages(op.inputs)
    )
    activations_only = "heads" in rule.names.values() and "h" not in rule.names
    if activations_only and has_parameter:
        return
    for letter, dim in signature.letters.items():
        name = rule.names.get("…" if letter.startswith("…") else letter)
        if name is None or not isinstance(dim, Leaf) or dim.name not in letters:
            continue
        if name == "entries":
            name = "vocab" if _is_input(op.inputs[1], graph) else "positions"
        weak = _WEAK if activations_only or letter in ("q", "t") else 0
        yield Hint(dim=letters[dim.name], name=name, rank=_RANKS[name] - weak)


def _is_input(tensor: str, graph: Graph) -> bool:
    return graph.tensors[graph.tensors[tensor].storage].origin is Origin.INPUT


def named(
    graph: Graph, dims: Mapping[str, tuple[Dim, ...]], unifier: Unifier, hints: list[Hint]
) -> tuple[dict[str, str], dict[Dim, str]]:
    """Return the names of all axes, and of concatenations that have a name as a whole."""
    proposals = [*_input_hints(graph, dims), *hints]
    chosen: dict[str, str] = {}
    wholes: dict[Dim, str] = {}
    seen: dict[str, set[str]] = {}
    for hint in sorted(proposals, key=lambda hint: -hint.rank):
        _propose(hint.dim, hint.name, unifier, chosen, wholes)
        for leaf in _free(hint.dim, unifier):
            seen.setdefault(leaf.name, set()).add(hint.name)
    _name_vocabularies(seen, chosen, {leaf.name: leaf.size for leaf in _every(dims, unifier)})
    wholes = {
        dim: name
        for dim, name in wholes.items()
        if not all(leaf.name in chosen for leaf in leaves(dim))  # named parts say more
    }
    inner = {leaf.name for dim in wholes for leaf in leaves(dim)}
    _name_inner_axes(graph, dims, unifier, chosen, inner)
    return _numbered(dims, unifier, chosen), wholes


def _name_vocabularies(
    seen: Mapping[str, set[str]], chosen: dict[str, str], sizes: Mapping[str, Extent]
) -> None:
    """Classes are a vocabulary where they are looked up too, or are as many as one."""
    for leaf, names in seen.items():
        if {"positions", "classes"} <= names and chosen[leaf] in ("positions", "classes"):
            chosen[leaf] = "vocab"
    vocabularies = {sizes[leaf] for leaf, name in chosen.items() if name == "vocab"}
    for leaf, name in chosen.items():
        if name == "classes" and sizes[leaf] in vocabularies:
            chosen[leaf] = "vocab"


def _every(dims: Mapping[str, tuple[Dim, ...]], unifier: Unifier) -> Iterator[Leaf]:
    for own in dims.values():
        for dim in own:
            yield from leaves(unifier.resolved(dim))


def _input_hints(graph: Graph, dims: Mapping[str, tuple[Dim, ...]]) -> Iterator[Hint]:
    for name in graph.inputs:
        tensor, own = graph.tensors[name], dims[name]
        if own:
            yield Hint(dim=own[0], name="batch", rank=_RANKS["batch"])
        if tensor.dtype.startswith("int") and len(own) > 1:
            yield Hint(dim=own[1], name="seq", rank=_RANKS["seq"])
        if not tensor.dtype.startswith("int") and len(own) == 4:
            for dim, word in zip(own[1:], ("channels", "height", "width"), strict=True):
                yield Hint(dim=dim, name=word, rank=_RANKS[word])


def _propose(
    dim: Dim, name: str, unifier: Unifier, chosen: dict[str, str], wholes: dict[Dim, str]
) -> None:
    top = unifier.structure(dim)
    if isinstance(top, Leaf):
        chosen.setdefault(top.name, name)
    elif isinstance(top, Product):
        open_ = [leaf for leaf in _free(top, unifier) if leaf.name not in chosen]
        whole = all(isinstance(unifier.structure(f), Leaf) for f in top.factors)
        if len(open_) == 1:
            chosen[open_[0].name] = name
        elif len(open_) == 2 and name == "heads" and whole:
            chosen[open_[0].name], chosen[open_[1].name] = "kv_heads", "group"
        joined = [f for f in map(unifier.structure, top.factors) if isinstance(f, Concat)]
        if not open_ and len(joined) == 1:  # heads whose slopes were laid end to end
            wholes.setdefault(unifier.resolved(joined[0]), name)
    elif name in _MADE_OF_ALIKE:
        for part in top.parts:
            _propose(part, name, unifier, chosen, wholes)
    else:
        wholes.setdefault(unifier.resolved(top), name)


def _free(dim: Dim, unifier: Unifier) -> list[Leaf]:
    """Return the free leaves in a product, or the leaf itself."""
    top = unifier.structure(dim)
    if isinstance(top, Leaf):
        return [top]
    if isinstance(top, Product):
        return [leaf for factor in top.factors for leaf in _free(factor, unifier)]
    return []


def _name_inner_axes(
    graph: Graph,
    dims: Mapping[str, tuple[Dim, ...]],
    unifier: Unifier,
    chosen: dict[str, str],
    excluded: set[str],
) -> None:
    """What two weights share with each other, and each with the width of the model, is ffn."""
    shared: dict[str, int] = {}
    for parameter in graph.parameters:
        resolved = [unifier.resolved(dim) for dim in dims[parameter.name]]
        found = [leaf.name for dim in resolved for leaf in leaves(dim)]
        if any(chosen.get(name) in ("embed", "channels", "ffn") for name in found):
            for name in set(found):
                if name not in chosen and name not in excluded and len(resolved) > 1:
                    shared[name] = shared.get(name, 0) + 1
    chosen.update({name: "ffn" for name, count in shared.items() if count > 1})


def _numbered(
    dims: Mapping[str, tuple[Dim, ...]], unifier: Unifier, chosen: dict[str, str]
) -> dict[str, str]:
    """Name every free axis; equal names of different sizes are numbered, no name is the size."""
    numbers: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for leaf in _every(dims, unifier):
        if leaf.name in names:
            continue
        name = chosen.get(leaf.name)
        if name is None:
            names[leaf.name] = str(leaf.size)
            continue
        sizes = numbers.setdefault(name, [])
        if str(leaf.size) not in sizes:
            sizes.append(str(leaf.size))
        index = sizes.index(str(leaf.size))
        names[leaf.name] = f"{name}_{index + 1}" if index else name
    return names
