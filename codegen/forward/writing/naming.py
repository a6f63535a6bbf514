"""Names values as the author did."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count

from autopar.codegen.forward.ops.sizes import Wanted, wanted
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    LocalTensor,
    Slot,
    SourceForm,
    identifier,
    is_identifier,
    pieces,
)
from autopar.codegen.forward.text.lines import IMPORTED, Body, Line, held_in
from autopar.codegen.forward.writing.statements import Loop, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a value that a body names: one entry per dim, "" if unused.

    `same` has the names of sizes that another value has given before.
    """

    held: LocalTensor
    names: tuple[str, ...]
    same: tuple[str, ...]

    def name(self, dim: int) -> str:
        """Return the name of one size, or ""."""
        return self.names[dim] or self.same[dim]

    @property
    def text(self) -> str:
        """The right way to unpack the sizes, with `{}` for the value."""
        named = [i for i, name in enumerate(self.names) if name]
        if len(named) == 1:
            return f"{self.names[named[0]]} = {{}}.shape[{named[0]}]"
        return f"{', '.join(name or '_' for name in self.names)} = {{}}.shape"


def shapes_of(
    statements: Sequence[Statement], split: SplitGraph, frame: Set[str]
) -> Iterator[Shape]:
    """Name the sizes of a value that are used more than once."""
    facts = [
        piece
        for statement in statements
        for piece in pieces(statement.expression)
        if isinstance(piece, Fact) and piece.what.startswith("shape[")
    ]
    counts = Counter(fact.held for fact in facts)
    taken = {*frame, "self", "x", "q", "k", "v", "y"}
    sizes: dict[Wanted, str] = {}
    for held, uses in counts.items():
        if uses < 2:
            continue
        used = {fact.what for fact in facts if fact.held == held}
        names, same = [], []
        for position, size in enumerate(wanted(split, held.tensor, held.layout)):
            is_used = f"shape[{position}]" in used
            same.append(sizes.get(size, "") if is_used else "")
            is_new = is_used and not same[-1]
            name = _fresh(split.axes.text(size.dim), taken) if is_new else ""
            names.append(name)
            taken.add(name)
            if is_new:
                sizes[size] = name
        yield Shape(held=held, names=tuple(names), same=tuple(same))


def _fresh(axis: str, taken: set[str]) -> str:
    name = identifier(re.sub(r"_\d+$", "", axis))
    is_one = re.fullmatch(r"\w+", axis) is not None
    stem = "size" if re.fullmatch(r"x?\d*", name) else name if is_one else "length"
    return next(n for n in chain([stem], (f"{stem}{i}" for i in count(2))) if n not in taken)


_ATTENTION = "F.scaled_dot_product_attention"
_LOSSES = ("F.cross_entropy", "vocab_parallel_cross_entropy")
_TELLING = frozenset({"cos", "sin", "query", "key", "value", "q", "k", "v", "gate", "up", "weight"})
_CASTS = frozenset({"to", "float", "type_as", "contiguous"})
_SHAPES = frozenset({"expand", "flatten", "permute", "reshape", "transpose", "unsqueeze", "view"})
_VAGUE = frozenset({"input", "x", "self", "args", "query", "key", "value"})
_USUAL = ("x", "y", "z", "h", "u", "w")
_AXIS = "tensor"  # the parameter of a printed loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNames:
    """The names of all values, and the named sizes."""

    names: Mapping[LocalTensor, str]
    shapes: tuple[Shape, ...]


def values_to_keep(lines: Sequence[Line]) -> frozenset[LocalTensor]:
    """Return the values that should have a name: inputs and outputs of attention."""
    operands = {held for line in lines for held in _operands(line.expression, (_ATTENTION,))}
    results = {
        held
        for line in lines
        if _is_call_of(line.expression, (_ATTENTION,))
        for held in held_in(line.results)
    }
    logits = {held for line in lines for held in _first_operands(line.expression, _LOSSES[1:])}
    return frozenset(operands | results | logits)


def named(
    statements: Sequence[Statement],
    body: Body,
    split: SplitGraph,
) -> ValueNames:
    """Return names for the values of a body's statements; arguments have theirs already."""
    return _Namer(statements, body, split).named()


class _Namer:
    def __init__(
        self,
        statements: Sequence[Statement],
        body: Body,
        split: SplitGraph,
    ) -> None:
        arguments = body.arguments
        self.statements, self.split = statements, split
        modules = split.modules.values()
        self.unpacks = {name: one for module in modules for name, one in module.unpacks.items()}
        self.names = dict(arguments)
        self.frame = {_AXIS, *(name.partition("[")[0] for name in arguments.values())}
        self.frame |= body.containers
        self.shapes = tuple(shapes_of(statements, split, self.frame))
        self.hints = dict(self._hints())
        self.last = self._last_uses()
        self.reserved = {name for shape in self.shapes for name in shape.names}
        self.reserved |= self.frame - set(arguments.values())  # batch, of batch["tokens"]
        self.reserved |= {line.function for s in statements for line in s.lines if line.function}
        self.reserved |= {s.line.header.split()[1] for s in statements if isinstance(s.line, Loop)}

    def named(self) -> ValueNames:
        for number, statement in enumerate(self.statements):
            if isinstance(statement.line, Loop):
                self._name_carried(number, statement.line)
            for position, held in enumerate(held_in(statement.results)):
                if held not in self.names:
                    self._name(held, statement, number, position)
        return ValueNames(names=self.names, shapes=self.shapes)

    def _name_carried(self, number: int, loop: Loop) -> None:
        # A value that every iteration reads must not share its name with an earlier one.
        read = {
            self.names[p if isinstance(p, LocalTensor) else p.held] for p in pieces(loop.expression)
        }
        for start, end in loop.carried:
            name = self.names[start]
            is_free = self.last.get(start, -1) <= number and not hasattr(builtins, name)
            self.names[end] = name if is_free else self._free(number, [], read)

    def _name(self, held: LocalTensor, statement: Statement, number: int, position: int) -> None:
        others = {self.names[h] for h in held_in(statement.results) if h in self.names}
        wishes = self._wishes(held, statement, number, position)
        if self.split.graph.tensors[held.tensor].requires_grad:
            wishes += _USUAL
        name = self._free(number, wishes, others)
        self.names[held] = name

    def _free(self, number: int, wishes: Sequence[str], others: set[str]) -> str:
        busy = {
            name
            for held, name in self.names.items()
            if self.last.get(held, -1) > number or name in others
        }
        stem = wishes[0] if wishes else "y"
        busy |= self.reserved | others | IMPORTED
        numbered = (f"{stem}{i}" for i in count(2))
        usual = _USUAL if len(stem) == 1 else ()
        return next(name for name in chain(wishes, usual, numbered) if name not in busy)

    def _wishes(
        self, held: LocalTensor, statement: Statement, number: int, position: int
    ) -> list[str]:
        hint, author = self.hints.get(held), _author_name(held, statement)
        wishes = [author] if author and not hasattr(builtins, author) else []
        return [
            *wishes,
            *([hint] if hint is not None else self._guesses(held, statement, number, position)),
        ]

    def _guesses(
        self, held: LocalTensor, statement: Statement, number: int, position: int
    ) -> list[str]:
        line = statement.line
        before = next((p for p in pieces(statement.expression) if isinstance(p, LocalTensor)), None)
        is_call = line.module is not None
        if isinstance(statement.results, tuple) and len(statement.results) > 1 and not is_call:
            return [f"{self._stem(before, held)}{position + 1}"]
        if _is_call_of(statement.expression, _LOSSES):
            return ["loss"]
        if _is_call_of(statement.expression, (_ATTENTION,)):
            return ["y"]
        telling = _hint(statement).removesuffix("_proj")
        if telling in _TELLING:
            return [identifier(telling)]
        ends_here = before is not None and self.last.get(before, -1) <= number
        is_next = _is_reshaping(statement) or (before is not None and self._are_alike(before, held))
        if before is not None and ends_here and is_next:
            name = self.names[before]
            return [name] if is_identifier(name) and not hasattr(builtins, name) else []
        return self._wishes_by_type(held, line.hint)

    def _are_alike(self, one: LocalTensor, other: LocalTensor) -> bool:
        dims = self.split.axes.dims
        return dims[one.tensor] == dims[other.tensor]

    def _stem(self, whole: LocalTensor | None, part: LocalTensor) -> str:
        """Return the stem for the names of a value's parts: the value's name, if it is similar."""
        tensors = self.split.graph.tensors
        if whole is None or tensors[whole.tensor].dtype != tensors[part.tensor].dtype:
            return "part"
        name = self.names.get(whole, "part")
        return name if is_identifier(name) else identifier(name.rpartition("[")[2])  # of batch["x"]

    def _wishes_by_type(self, held: LocalTensor, hint: str) -> list[str]:
        tensor = self.split.graph.tensors[held.tensor]
        if tensor.dtype == "bool":
            return ["mask"]
        if hint.startswith("arange"):
            return ["positions"]
        if tensor.dtype.startswith("int"):
            return ["ids"]
        return []

    def _hints(self) -> Iterator[tuple[LocalTensor, str]]:
        found: dict[LocalTensor, str] = {}
        for statement in reversed(self.statements):
            for held, hint in zip(
                _operands(statement.expression, (_ATTENTION,)), "qkv", strict=False
            ):
                found.setdefault(held, hint)
            for held in _first_operands(statement.expression, _LOSSES):
                found.setdefault(held, "logits")
            for name, held in self._passed(statement):
                found.setdefault(held, name)
            wanted = [found.get(held) for held in held_in(statement.results)]
            first = next(
                (p for p in pieces(statement.expression) if isinstance(p, LocalTensor)), None
            )
            if first is None or first in self.names or len(wanted) != 1:
                continue
            (held,) = held_in(statement.results)
            is_turned = wanted[0] in ("q", "k", "v") and self._are_alike(first, held)
            if is_turned or _is_reshaping(statement):
                name = _author_name(held, statement) or wanted[0] or ""
                found |= {first: name} if name and first not in found else {}
        yield from found.items()

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
                        (one, held) for one, held in zip(names_inside, parts, strict=True) if one
                    )

    def _last_uses(self) -> dict[LocalTensor, int]:
        bound = {
            (s.held, f"shape[{i}]") for s in self.shapes for i in range(len(s.names)) if s.name(i)
        }
        last: dict[LocalTensor, int] = {}
        for number, statement in enumerate(self.statements):
            for piece in pieces(statement.expression):
                if isinstance(piece, LocalTensor):
                    last[piece] = number
                elif (piece.held, piece.what) not in bound:
                    last[piece.held] = number
        return last


def _author_name(held: LocalTensor, statement: Statement) -> str:
    """Return the author's name of a value, or of the value that it reshapes or casts."""
    made = list(held_in(statement.line.results))
    if len(statement.line.names) == len(made) > 1:
        return statement.line.names[made.index(held)]
    for line in reversed(statement.lines):
        if len(line.names) == 1 and line.names[0]:
            return line.names[0]
        if line.hint not in _SHAPES | _CASTS:
            break
    return ""


def _is_reshaping(statement: Statement) -> bool:
    """Whether a statement only reshapes or casts a value."""
    return all(line.hint in _SHAPES | _CASTS for line in statement.lines)


def _hint(statement: Statement) -> str:
    """Return a statement's outermost operation that is not a cast."""
    hints = [line.hint for line in reversed(statement.lines)]
    return next((hint for hint in hints if hint not in _CASTS), hints[0])


def _is_call_of(expression: Expression, functions: tuple[str, ...]) -> bool:
    first = expression.parts[0] if isinstance(expression, SourceForm) else None
    return isinstance(first, str) and first.rstrip("(") in functions


def _first_operands(expression: Expression, functions: tuple[str, ...]) -> Iterator[LocalTensor]:
    """Yield the plain values that are the first argument of a function."""
    if isinstance(expression, SourceForm):
        slots = [part.expression for part in expression.parts if isinstance(part, Slot)]
        if _is_call_of(expression, functions) and slots and isinstance(slots[0], LocalTensor):
            yield slots[0]
        for slot in slots:
            yield from _first_operands(slot, functions)


def _operands(expression: Expression, functions: tuple[str, ...]) -> Iterator[LocalTensor]:
    """Yield the plain values that are the first three arguments of a function."""
    if not isinstance(expression, SourceForm):
        return
    slots = [part.expression for part in expression.parts if isinstance(part, Slot)]
    if _is_call_of(expression, functions):
        yield from (slot for slot in slots[:3] if isinstance(slot, LocalTensor))
    for slot in slots:
        yield from _operands(slot, functions)
