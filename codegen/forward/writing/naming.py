"""Names values as the author did."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count

from autopar.codegen.forward.ops.sizes import SizeToPrint, wanted
from autopar.codegen.forward.reading.modules import Modules
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.forward.writing.statements import Loop, Statement
from autopar.codegen.text.expressions import (
    Expression,
    Fact,
    LocalTensor,
    Slot,
    SourceForm,
    identifier,
    is_identifier,
    pieces,
)
from autopar.codegen.text.lines import Body, Line, values_in
from autopar.codegen.text.values import IN_FORWARDS
from autopar.planner.graph.graph import Graph, once_per_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The names that a body gives to a value's sizes: one per dim, "" for a size without a name.

    `same` has the names of sizes that are already named for an earlier value.
    """

    value: LocalTensor
    names: tuple[str, ...]
    same: tuple[str, ...]

    def name(self, dim: int) -> str:
        """Return the name of one size, or ""."""
        return self.names[dim] or self.same[dim]

    @property
    def text(self) -> str:
        """The line that unpacks the sizes, with `{}` for the value."""
        named = [i for i, name in enumerate(self.names) if name]
        if len(named) == 1:
            return f"{self.names[named[0]]} = {{}}.shape[{named[0]}]"
        return f"{', '.join(name or '_' for name in self.names)} = {{}}.shape"


def shapes_of(
    statements: Sequence[Statement],
    split: SplitGraph,
    frame: Set[str],
    arguments: Mapping[LocalTensor, str],
) -> Iterator[Shape]:
    """Yield names for the sizes of each value whose sizes are used more than once."""
    facts = [
        piece
        for statement in statements
        for piece in pieces(statement.expression)
        if isinstance(piece, Fact) and piece.what.startswith("shape[")
    ]
    counts = Counter(fact.value for fact in facts)
    taken = {*frame, "self", "x", "q", "k", "v", "y"}
    sizes: dict[SizeToPrint, str] = {}
    for local, uses in counts.items():
        if uses < 2:
            continue
        used = {fact.what for fact in facts if fact.value == local}
        names, same = [], []
        for position, size in enumerate(wanted(split, local.tensor, local.layout)):
            is_used = f"shape[{position}]" in used
            same.append(sizes.get(size, "") if is_used else "")
            is_new = is_used and not same[-1]
            whose = "local" if local.layout.dim == position else arguments.get(local, "")
            name = _fresh(split.axes.text(size.dim), whose, taken) if is_new else ""
            names.append(name)
            taken.add(name)
            if is_new:
                sizes[size] = name
        yield Shape(value=local, names=tuple(names), same=tuple(same))


def _fresh(axis: str, whose: str, taken: set[str]) -> str:
    name = identifier(re.sub(r"_\d+$", "", axis))
    is_one = re.fullmatch(r"\w+", axis) is not None
    stem = "size" if re.fullmatch(r"x?\d*", name) else name if is_one else "length"
    wishes = [stem, f"{whose}_{stem}" if is_identifier(whose) else stem]
    return next(n for n in chain(wishes, (f"{stem}{i}" for i in count(2))) if n not in taken)


_ATTENTION = "F.scaled_dot_product_attention"
_LOSSES = ("F.cross_entropy", "vocab_parallel_cross_entropy")
_CASTS = frozenset({"to", "float", "type_as", "contiguous"})
_SHAPES = frozenset({"expand", "flatten", "permute", "reshape", "transpose", "unsqueeze", "view"})
_VAGUE = frozenset({"input", "x", "self", "args", "query", "key", "value"})
_USUAL = ("x", "y", "z", "h", "u", "w")
_AXIS = "tensor"  # the parameter of a printed loss


def values_to_keep(lines: Sequence[Line]) -> frozenset[LocalTensor]:
    """Return the values that should have a name: inputs and outputs of attention, split logits."""
    operands = {local for line in lines for local in _operands(line.expression, (_ATTENTION,), 3)}
    results = {
        local
        for line in lines
        if _is_call_of(line.expression, (_ATTENTION,))
        for local in values_in(line.results)
    }
    logits = {local for line in lines for local in _operands(line.expression, _LOSSES[1:], 1)}
    return frozenset(operands | results | logits)


@once_per_graph
def _unpacked(_: Graph, modules: Modules) -> Mapping[str, tuple[str, ...]]:
    """Return the names into which the modules' forwards unpack each of their variables."""
    return {name: one for module in modules.values() for name, one in module.unpacks.items()}


class Namer:
    """Names the values of a body's statements, and sizes; arguments have names already.

    `names` has the names of all values, `shapes` those of sizes.
    """

    def __init__(self, statements: Sequence[Statement], body: Body, split: SplitGraph) -> None:
        arguments = body.arguments
        self.statements, self.split = statements, split
        self.unpacks = _unpacked(split.graph, split.modules)
        self.names = dict(arguments)
        self.frame = {_AXIS, *(name.partition("[")[0] for name in arguments.values())}
        self.frame |= body.containers
        self.shapes = tuple(shapes_of(statements, split, self.frame, arguments))
        self.given = {
            local: names
            for line in body.lines
            for local, names in zip(values_in(line.results), line.names, strict=False)
        }
        loops = (s.line for s in statements if isinstance(s.line, Loop))
        self.carried = {start: end for loop in loops for start, end in loop.carried}
        self.taken_as: dict[LocalTensor, str] = {}
        self.part_of: dict[LocalTensor, str] = {}
        self._find_readers()
        self.last = self._last_uses()
        self.reserved = {name for shape in self.shapes for name in shape.names}
        self.reserved |= self.frame - set(arguments.values())  # batch, of batch["tokens"]
        self.reserved |= {line.function for s in statements for line in s.lines if line.function}
        self.reserved |= {s.line.header.split()[1] for s in statements if isinstance(s.line, Loop)}
        self._name_all()

    def _name_all(self) -> None:
        for number, statement in enumerate(self.statements):
            if isinstance(statement.line, Loop):
                self._name_carried(number, statement.line)
            for position, local in enumerate(values_in(statement.results)):
                if local not in self.names:
                    self._name(local, statement, number, position)

    def _name_carried(self, number: int, loop: Loop) -> None:
        # A loop's result must not take the name of a value that every iteration reads.
        read = {
            self.names[p if isinstance(p, LocalTensor) else p.value]
            for p in pieces(loop.expression)
        }
        for start, end in loop.carried:
            name = self.names[start]
            is_free = self.last.get(start, -1) <= number and not hasattr(builtins, name)
            self.names[end] = name if is_free else self._free(number, self._authors(end), read)

    def _name(self, local: LocalTensor, statement: Statement, number: int, position: int) -> None:
        others = {self.names[h] for h in values_in(statement.results) if h in self.names}
        wishes = [*self._authors(local), *self._from_readers(local)]
        wishes += self._followed(local, statement, number, position)
        self.names[local] = self._free(number, wishes, others)

    def _free(self, number: int, wishes: Sequence[str], others: set[str]) -> str:
        busy = {
            name
            for local, name in self.names.items()
            if self.last.get(local, -1) > number or name in others
        }
        busy |= self.reserved | others | IN_FORWARDS.keys()
        wishes = [name for name in wishes if not hasattr(builtins, name)]
        stem = wishes[0] if wishes else "y"
        numbered = (f"{stem}{i}" for i in count(2))
        return next(name for name in chain(wishes, _USUAL, numbered) if name not in busy)

    def _authors(self, local: LocalTensor) -> Sequence[str]:
        """Return the author's names of a value, after the names of its loop's result, if any."""
        goes_on = (*self.given.get(self.carried[local], ()),) if local in self.carried else ()
        return (*goes_on, *self.given.get(local, ()))

    def _from_readers(self, local: LocalTensor) -> Sequence[str]:
        """Return the names of the parameter that takes a value, and of the result made from it."""
        return [name for name in (self.taken_as.get(local), self.part_of.get(local)) if name]

    def _followed(
        self, local: LocalTensor, statement: Statement, number: int, position: int
    ) -> Sequence[str]:
        """Return the name of the first value that a statement reads, if its result may have it.

        Parts get numbered names: `x1, x2 = x.chunk(2)`. A value of the same dims, or of another
        shape, gets the same name if no later statement reads the first value.
        """
        before = next((p for p in pieces(statement.expression) if isinstance(p, LocalTensor)), None)
        if before is None:
            return []
        name = self.names[before]
        name = name if is_identifier(name) else identifier(name.rpartition("[")[2])  # batch["x"]
        if isinstance(statement.results, tuple) and statement.line.module is None:
            return [f"{name}{position + 1}"] if len(statement.results) > 1 else [name]
        ends_here = self.last.get(before, -1) <= number
        is_next = _is_reshaping(statement) or self._are_alike(before, local)
        return [name] if ends_here and is_next else []

    def _are_alike(self, one: LocalTensor, other: LocalTensor) -> bool:
        dims = self.split.axes.dims
        return dims[one.tensor] == dims[other.tensor]

    def _find_readers(self) -> None:
        """Find names for values in code that reads them; the last of several readers decides."""
        readers = Counter(local for s in self.statements for local in _read(s))
        for statement in reversed(self.statements):
            attended = _operands(statement.expression, (_ATTENTION,), 3)
            scored = _operands(statement.expression, _LOSSES, 1)
            taken = [*zip("qkv", attended, strict=False), *(("logits", one) for one in scored)]
            for name, local in (*taken, *self._passed(statement)):
                self.taken_as.setdefault(local, name)
            made = list(values_in(statement.results))
            if len(made) == 1:
                names = [*self._authors(made[0]), *self._from_readers(made[0])]
                for local in _read(statement):
                    if names and readers[local] == 1:
                        self.part_of[local] = names[0]

    def _passed(self, statement: Statement) -> Iterator[tuple[str, LocalTensor]]:
        """Yield the values passed to modules, with the modules' parameter names."""
        for line in reversed(statement.lines):
            module = self.split.modules.get(line.module) if line.module is not None else None
            names = [argument.name for argument in module.arguments] if module is not None else []
            for position, (keyword, value) in enumerate(line.arguments if module else ()):
                name = keyword or (names[position] if position < len(names) else "")
                if isinstance(value, LocalTensor) and is_identifier(name) and name not in _VAGUE:
                    yield name, value
                parts = [piece for piece in pieces(value) if isinstance(piece, LocalTensor)]
                names_inside = self.unpacks.get(name, ())
                if isinstance(value, SourceForm) and len(parts) == len(names_inside):
                    yield from (
                        (one, local) for one, local in zip(names_inside, parts, strict=True) if one
                    )

    def _last_uses(self) -> dict[LocalTensor, int]:
        bound = {
            (s.value, f"shape[{i}]") for s in self.shapes for i in range(len(s.names)) if s.name(i)
        }
        last: dict[LocalTensor, int] = {}
        for number, statement in enumerate(self.statements):
            for piece in pieces(statement.expression):
                if isinstance(piece, LocalTensor):
                    last[piece] = number
                elif (piece.value, piece.what) not in bound:
                    last[piece.value] = number
        return last


def _read(statement: Statement) -> set[LocalTensor]:
    """Return the values that a statement reads."""
    found = pieces(statement.expression)
    return {piece if isinstance(piece, LocalTensor) else piece.value for piece in found}


def _is_reshaping(statement: Statement) -> bool:
    """Whether a statement only reshapes or casts a value."""
    return all(line.hint in _SHAPES | _CASTS for line in statement.lines)


def _is_call_of(expression: Expression, functions: tuple[str, ...]) -> bool:
    first = expression.parts[0] if isinstance(expression, SourceForm) else None
    return isinstance(first, str) and first.rstrip("(") in functions


def _operands(
    expression: Expression, functions: tuple[str, ...], most: int
) -> Iterator[LocalTensor]:
    """Yield the plain values among the first `most` arguments of calls of these functions."""
    if not isinstance(expression, SourceForm):
        return
    slots = [part.expression for part in expression.parts if isinstance(part, Slot)]
    if _is_call_of(expression, functions):
        yield from (slot for slot in slots[:most] if isinstance(slot, LocalTensor))
    for slot in slots:
        yield from _operands(slot, functions, most)
