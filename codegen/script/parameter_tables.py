"""Turns a plan into the tables of its parameters, with one pattern for many layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

from autopar.codegen.text.values import (
    Bracketed,
    Source,
    assigned,
    call,
    literal,
    row,
    table,
    tuple_of,
    unpacked,
)
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.findings.optimizer_call import learning_parameters
from autopar.planner.findings.writes import steady_buffers
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import LayoutKind
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import narrowed_buffers
from autopar.planner.programs.layouts.strategies import Parts, parts_of
from autopar.runtime.tensor.shards import starred

Value = TypeVar("Value")
_FEWEST_IN_STEPS = 3  # fewer numbers that are not consecutive do not become a range


def patterns(table: Mapping[str, Value], known: Iterable[str]) -> dict[str, Value]:
    """Return a table with patterns in place of names that have equal values.

    `known` are all names: a pattern must not match one that the table lacks. Of several patterns
    that match a name, the one that matches most names is taken. A pattern may also match names
    with other values, whose own rows take precedence.
    """
    families: dict[str, list[str]] = {}
    for name in {**dict.fromkeys(known), **dict.fromkeys(table)}:
        for form in starred(name):
            families.setdefault(form, []).append(name)
    whole = {
        form: family
        for form, family in families.items()
        if len(family) > 1 and all(name in table for name in family)
    }
    found: dict[str, Value] = {}
    for name, value in table.items():
        alike = (
            f for f in starred(name) if f in whole and all(table[n] == value for n in whole[f])
        )
        found[max(alike, key=lambda form: len(whole[form]), default=name)] = value
    for form, family in sorted(whole.items(), key=lambda item: -len(item[1])):
        if all(name in found for name in family):
            values = [found[name] for name in family]
            most = max(values, key=values.count)
            names = [n for n in family if found[n] == most and _agrees(found, n, most)]
            if len(names) > 1:
                found = _starring(found, form, names)
    return found


def _agrees(found: Mapping[str, Value], name: str, value: Value) -> bool:
    """Whether no existing pattern gives this name another value."""
    return all(found.get(form, value) == value for form in starred(name))


def _starring(found: Mapping[str, Value], form: str, names: list[str]) -> dict[str, Value]:
    """Return the table with a pattern, `form`, in place of names with equal values."""
    first, *others = names
    return {
        (form if name == first else name): value
        for name, value in found.items()
        if name not in others
    }


def outermost(chosen: Collection[str], names: Iterable[str]) -> Iterator[str]:
    """Yield the chosen names; a module stands for its names if all of them are chosen."""
    every = list(names)
    others = set(every).difference(chosen)
    yield from dict.fromkeys(_outermost(name, others) for name in every if name in chosen)


def _outermost(name: str, others: Collection[str]) -> str:
    parts = name.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if not any(other.startswith(f"{module}.") for other in others):
            return module
    return name


def numbered_tuple(names: Iterable[str]) -> Bracketed:
    """Return a tuple of names as Python; consecutive names become `expand("h.*", range(4))`."""
    runs = tuple(numbered_runs(names))
    if len(runs) == 1 and isinstance(runs[0], Bracketed):
        return Bracketed(runs[0].opening.removeprefix("*"), runs[0].items, runs[0].closing)
    return tuple_of(*(run.flat if isinstance(run, Bracketed) else run for run in runs))


def numbered_runs(names: Iterable[str]) -> Iterator[str | Bracketed]:
    """Yield names as Python; consecutive names become `*expand(…)`."""
    for (pattern, _), run in groupby(enumerate(names), key=_place_of_run):
        own = [name for _, name in run]
        if len(own) == 1:
            yield literal(own[0])
        else:
            first = _numbered(own[0])[1] or 0
            bounds = f"{first}, {first + len(own)}" if first else f"{len(own)}"
            yield call("*expand", literal(pattern), f"range({bounds})")


def _place_of_run(placed: tuple[int, str]) -> tuple[str, int]:
    """Return a key that consecutive names share: their pattern, and number minus position."""
    place, name = placed
    pattern, number = _numbered(name)
    return pattern, -1 - place if number is None else number - place


def numbered_rows(table: Mapping[str, Value]) -> Iterator[tuple[str | Bracketed, Value]]:
    """Yield a table's names as Python with their values; regularly numbered names become one call.

    For example `expand("h.*.attn", range(1, 4))` for three names with one value.
    """
    numbers: dict[tuple[str, Value], list[int]] = {}
    for name, value in table.items():
        pattern, number = _numbered(name)
        if number is not None:
            numbers.setdefault((pattern, value), []).append(number)
    ranges = {key: _range(sorted(own)) for key, own in numbers.items()}
    done = set[tuple[str, Value]]()
    for name, value in table.items():
        pattern, number = _numbered(name)
        bounds = ranges.get((pattern, value)) if number is not None else None
        if bounds is None:
            yield literal(name), value
        elif (pattern, value) not in done:
            done.add((pattern, value))
            yield call("expand", literal(pattern), f"range({bounds})"), value


def _range(numbers: Sequence[int]) -> str | None:
    """Return the bounds of a range with exactly these numbers, or None."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) != 1 or (steps != {1} and len(numbers) < _FEWEST_IN_STEPS):
        return None
    (step,) = steps
    first, end = numbers[0], numbers[-1] + 1
    if step > 1:
        return f"{first}, {end}, {step}"
    return f"{first}, {end}" if first else f"{end}"


def _numbered(name: str) -> tuple[str, int | None]:
    """Return a name with a star for its only number, and the number; else the name and None."""
    found = re.findall(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])", name)
    if len(found) != 1 or "*" in name or len(starred(name)) != 1:
        return name, None
    return starred(name)[0], int(found[0])


def splits_table(plan: Plan, axes: GraphAxes) -> Source:
    """Return the table of split parameters and buffers, with the axis of each as a comment."""
    splits = dict(_splits(plan, axes)) if plan.arrangement.tensor > 1 else {}
    if not splits:
        return Source()
    found = numbered_rows(patterns(splits, names_with_aliases(plan.graph)))
    rows = [(*row(names, text), axis) for names, (text, axis) in found]
    has_parts = any(", " in text for text, _ in splits.values())
    return table("SPLITS", ("{", "}"), rows, meaning=_WITH_PARTS if has_parts else _SHARDS)


_SHARDS = "Split(dim): each tensor rank holds a shard along this dim"
_WITH_PARTS = "Split(dim, parts); a part is (blocks, elements of a block), and blocks stay whole"


def replicated_table(plan: Plan) -> Source:
    """Return the list of whole parameters whose gradients tensor ranks add up."""
    summed = set(_summed(plan) if plan.arrangement.tensor > 1 else ())
    if not summed:
        return Source()
    names = (one for one, _ in numbered_rows(_modules_of(summed, plan.graph)))
    kept = ", in buckets of their own" if has_buckets_apart(plan.arrangement) else " over the ranks"
    meaning = f"whole on each tensor rank; train_step adds up their gradients{kept}"
    return assigned("REPLICATED", tuple_of(*map(unpacked, names)), meaning)


def _modules_of(chosen: Collection[str], graph: Graph) -> dict[str, bool]:
    """Return the chosen parameters; a module stands for its parameters if all are chosen."""
    aliases = aliases_of(graph)
    names = [alias for one in graph.parameters for alias in aliases[one.name]]
    found = dict.fromkeys(outermost(chosen, names), True)
    around = (name.split(".") for name in names)
    known = [".".join(parts[: end + 1]) for parts in around for end in range(len(parts))]
    return patterns(found, [one for one in known if not _is_within(one, found)])


def _is_within(name: str, modules: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts)))


def names_with_aliases(graph: Graph) -> Iterator[str]:
    """Yield every name of every parameter and buffer."""
    for names in aliases_of(graph).values():
        yield from names


def aliases_of(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return all names of each parameter and buffer, by its name in the graph."""
    found = {p.name: tuple(dict.fromkeys((p.name, *p.aliases))) for p in graph.parameters}
    return found | {buffer.name: (buffer.name,) for buffer in graph.buffers}


def unread(plan: Plan) -> Source:
    """Return the list of trainable parameters that no op reads, or "" without fully_shard."""
    graph = plan.graph
    has_unused = any(call.has_unused for call in graph.calls.values())
    if not has_unused or plan.arrangement.data == 1 or not plan.arrangement.zero.shards_modules:
        return Source()
    aliases = aliases_of(graph)
    learns = [one.name for one in graph.parameters if one.trainable]
    found = {alias for name in learns if name not in graph.index.readers for alias in aliases[name]}
    known = [alias for name in learns for alias in aliases[name]]
    return assigned("UNREAD", numbered_tuple(outermost(found, known))) if found else Source()


def once(plan: Plan) -> Source:
    """Return the script's list of buffers that a step writes once, not in each microbatch."""
    found = steady_buffers(plan.graph) if plan.arrangement.microbatches > 1 else ()
    known = [one.name for one in plan.graph.buffers]
    return assigned("ONCE", numbered_tuple(outermost(found, known))) if found else Source()


def half_buffers(plan: Plan) -> Source:
    """Return the script's list of fp32 buffers that a 16-bit plan casts."""
    found = dict.fromkeys((one.name for one in narrowed_buffers(plan)), True)
    names = patterns(found, [one.name for one in plan.graph.buffers])
    meaning = "buffers that are cast to 16 bits, too, because the model computes with them"
    return assigned("HALF_BUFFERS", tuple_of(*map(literal, names)), meaning) if found else Source()


def has_buckets_apart(arranged: Arrangement) -> bool:
    """Whether gradients that tensor or pipeline ranks also add up are in buckets of their own."""
    divides = arranged.zero.gathers_updated and arranged.shard > 1
    return divides or arranged.compression.keeps_lost


def _splits(plan: Plan, axes: GraphAxes) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each split parameter's name, the text of its cut, and the name of its axis."""
    aliases = aliases_of(plan.graph)
    for one in plan.parameters:
        layout = one.layout
        if layout.kind is LayoutKind.SPLIT and one.name in aliases:
            parts = parts_of(axes.dims[one.name][layout.dim], layout.axis, 1)
            name = axes.names.get(layout.axis, layout.axis)
            text = split_text(layout.dim, parts, degree=plan.arrangement.tensor)
            for alias in aliases[one.name]:
                yield alias, (text, name)


def split_text(dim: int, parts: Parts, *, degree: int = 0) -> str:
    """Return the cut of a dim as Python.

    `parts` is a tuple of (blocks, elements of a block). It is left out if the runtime can infer it:
    one part, of blocks of one element, or of blocks that divide evenly over `degree` ranks. Equal
    parts, as of a fused q-k-v weight, are printed as a product: `((12, 64),) * 3`.
    """
    blocks, size = parts[0]
    if len(parts) == 1 and (size == 1 or (degree and blocks % degree == 0)):
        return f"Split({dim})"
    if len(parts) > 1 and len(set(parts)) == 1:
        return f"Split({dim}, ({literal(parts[0])},) * {len(parts)})"
    return f"Split({dim}, {literal(parts)})"


def _summed(plan: Plan) -> Iterator[str]:
    aliases = aliases_of(plan.graph)
    learning = learning_parameters(plan.graph)
    for one in plan.parameters:
        if one.layout.kind is LayoutKind.REPLICATED and one.name in learning:
            yield from aliases[one.name]
