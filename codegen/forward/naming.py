"""Chooses names for the values of a body; a name serves again when its value is not needed."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

from autopar.codegen.forward.expressions import Expression, Fact, Form, Held, Slot, pieces
from autopar.codegen.forward.identifiers import identifier, is_identifier
from autopar.codegen.forward.lines import Line, held_in
from autopar.codegen.forward.loops import Loop
from autopar.codegen.forward.sizes import Wanted, wanted
from autopar.codegen.forward.split import Split
from autopar.codegen.forward.statements import Statement

_ATTENTION = "F.scaled_dot_product_attention"
_LOSSES = ("F.cross_entropy", "vocab_parallel_cross_entropy")
_TELLING = frozenset({"cos", "sin", "query", "key", "value", "q", "k", "v", "gate", "up", "weight"})
_VAGUE = frozenset({"input", "x", "self", "args", "query", "key", "value"})
_USUAL = ("x", "y", "z", "h", "u", "w")
_AXIS = "tensor"  # the argument of a loss that is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one value that a body gives names to: one entry per dim, "" where unused.

    `same` holds the names of sizes that another value has given before.
    """

    held: Held
    names: tuple[str, ...]
    same: tuple[str, ...]

    def name(self, dim: int) -> str:
        """Return the name of one size, "" where it has none."""
        return self.names[dim] or self.same[dim]

    @property
    def text(self) -> str:
        """The right way to unpack the sizes, with `{}` for the value."""
        named = [i for i, name in enumerate(self.names) if name]
        if len(named) == 1:
            return f"{self.names[named[0]]} = {{}}.shape[{named[0]}]"
        return f"{', '.join(name or '_' for name in self.names)} = {{}}.shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The names of all values, which of them are known to be tensors, and the named sizes."""

    names: Mapping[Held, str]
    typed: frozenset[Held]
    shapes: tuple[Shape, ...]


def values_to_keep(lines: Sequence[Line]) -> frozenset[Held]:
    """Return the values that deserve a name: what goes into attention, and what comes out."""
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
    arguments: Mapping[Held, str],
    typed: frozenset[str],
    split: Split,
) -> Named:
    """Return names for the values of some statements, whose arguments have theirs."""
    return _Namer(statements, arguments, typed, split).named()


class _Namer:
    def __init__(
        self,
        statements: Sequence[Statement],
        arguments: Mapping[Held, str],
        typed: frozenset[str],
        split: Split,
    ) -> None:
        self.statements, self.split = statements, split
        self.names = dict(arguments)
        self.typed = {held for held, name in arguments.items() if name in typed}
        self.kinds = {name: name in typed for name in arguments.values()}
        self.frame = {_AXIS, *(name.partition("[")[0] for name in arguments.values())}
        self.shapes = tuple(self._shapes())
        self.hints = dict(self._hints())
        self.last = self._last_uses()
        self.reserved = {name for shape in self.shapes for name in shape.names}
        self.reserved |= self.frame - set(arguments.values())  # batch, of batch["tokens"]
        self.reserved |= {s.line.header.split()[1] for s in statements if isinstance(s.line, Loop)}

    def named(self) -> Named:
        for number, statement in enumerate(self.statements):
            if isinstance(statement.line, Loop):
                self._name_carried(number, statement.line)
            for position, held in enumerate(held_in(statement.results)):
                if held not in self.names:
                    self._name(held, statement, number, position)
        return Named(names=self.names, typed=frozenset(self.typed), shapes=self.shapes)

    def _name_carried(self, number: int, loop: Loop) -> None:
        # What every turn reads must not lie under a name that is given before the first of them.
        read = {self.names[p if isinstance(p, Held) else p.held] for p in pieces(loop.expression)}
        for start, end in loop.carried:
            name = self.names[start]
            is_free = self.last.get(start, -1) <= number and not hasattr(builtins, name)
            self.names[end] = name if is_free else self._free(number, [], read)
            if start in self.typed:
                self.typed.add(end)
                self.kinds[self.names[end]] = True

    def _name(self, held: Held, statement: Statement, number: int, position: int) -> None:
        others = {self.names[h] for h in held_in(statement.results) if h in self.names}
        name = self._free(number, self._wishes(held, statement, number, position), others)
        self.names[held] = name
        known = self.kinds.setdefault(name, is_tensor(statement.expression, self.typed))
        if known:
            self.typed.add(held)

    def _free(self, number: int, wishes: Sequence[str], others: set[str]) -> str:
        busy = {
            name
            for held, name in self.names.items()
            if self.last.get(held, -1) > number or name in others
        }
        for wish in (*wishes, *_USUAL):
            if wish not in busy and wish not in self.reserved and wish not in others:
                return wish
        stem = wishes[0] if wishes else "y"
        return next(
            name
            for name in (f"{stem}{i}" for i in count(2))
            if name not in busy and name not in self.reserved
        )

    def _wishes(self, held: Held, statement: Statement, number: int, position: int) -> list[str]:
        hint, line = self.hints.get(held), statement.line
        if hint is not None:
            return [hint]
        before = next((p for p in pieces(statement.expression) if isinstance(p, Held)), None)
        is_call = line.module is not None
        if isinstance(statement.results, tuple) and len(statement.results) > 1 and not is_call:
            source = self.names.get(before, "part") if before is not None else "part"
            stem = source if is_identifier(source) else identifier(source.rpartition("[")[2])
            return [f"{stem}{position + 1}"]  # of batch["x"]: x1
        if _is_call_of(statement.expression, _LOSSES):
            return ["loss"]
        if _is_call_of(statement.expression, (_ATTENTION,)):
            return ["y"]
        telling = line.hint.removesuffix("_proj")
        if telling in _TELLING:
            return [identifier(telling)]
        dims = self.split.axes.dims
        ends_here = before is not None and self.last.get(before, -1) <= number
        if before is not None and ends_here and dims[before.tensor] == dims[held.tensor]:
            name = self.names[before]
            return [name] if is_identifier(name) and not hasattr(builtins, name) else []
        return self._wishes_by_type(held, line.hint)

    def _wishes_by_type(self, held: Held, hint: str) -> list[str]:
        tensor = self.split.graph.tensors[held.tensor]
        if tensor.dtype == "bool":
            return ["mask"]
        if hint.startswith("arange"):
            return ["positions"]
        if tensor.dtype.startswith("int"):
            return ["ids"]
        return []

    def _hints(self) -> Iterator[tuple[Held, str]]:
        found: dict[Held, str] = {}
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
            first = next((p for p in pieces(statement.expression) if isinstance(p, Held)), None)
            is_chain = first is not None and first not in self.names and len(wanted) == 1
            if is_chain and wanted[0] in ("q", "k", "v") and first is not None:
                found.setdefault(first, wanted[0])
        yield from found.items()

    def _passed(self, statement: Statement) -> Iterator[tuple[str, Held]]:
        """Yield the values that a module is given, with the module's own names for them."""
        line = statement.line
        module = self.split.modules.get(line.module) if line.module is not None else None
        if module is None:
            return
        names = [argument.name for argument in module.arguments]
        for position, (keyword, value) in enumerate(line.arguments):
            name = keyword or (names[position] if position < len(names) else "")
            if isinstance(value, Held) and is_identifier(name) and name not in _VAGUE:
                yield name, value

    def _last_uses(self) -> dict[Held, int]:
        bound = {
            (s.held, f"shape[{i}]") for s in self.shapes for i in range(len(s.names)) if s.name(i)
        }
        last: dict[Held, int] = {}
        for number, statement in enumerate(self.statements):
            for piece in pieces(statement.expression):
                if isinstance(piece, Held):
                    last[piece] = number
                elif (piece.held, piece.what) not in bound:
                    last[piece.held] = number
        return last

    def _shapes(self) -> Iterator[Shape]:
        """Name the sizes of a value that are used more than once."""
        facts = [
            piece
            for statement in self.statements
            for piece in pieces(statement.expression)
            if isinstance(piece, Fact) and piece.what.startswith("shape[")
        ]
        counts = Counter(fact.held for fact in facts)
        taken = self.frame | {"self", "x", "q", "k", "v", "y"}
        sizes: dict[Wanted, str] = {}
        for held, uses in counts.items():
            if uses < 2:
                continue
            used = {fact.what for fact in facts if fact.held == held}
            names, same = [], []
            for position, size in enumerate(wanted(self.split, held.tensor, held.layout)):
                is_used = f"shape[{position}]" in used
                same.append(sizes.get(size, "") if is_used else "")
                is_new = is_used and not same[-1]
                name = _fresh(self.split.axes.text(size.dim), taken) if is_new else ""
                names.append(name)
                taken.add(name)
                if is_new:
                    sizes[size] = name
            yield Shape(held=held, names=tuple(names), same=tuple(same))


def _fresh(axis: str, taken: set[str]) -> str:
    name = identifier(re.sub(r"_\d+$", "", axis))
    stem = "size" if re.fullmatch(r"x?\d*", name) else name
    return next(n for n in chain([stem], (f"{stem}{i}" for i in count(2))) if n not in taken)


def is_tensor(expression: Expression, typed: set[Held] | frozenset[Held]) -> bool:
    """Whether a type checker knows that an expression is a tensor."""
    if isinstance(expression, Held):
        return expression in typed
    if isinstance(expression, Fact) or not expression.is_tensor:
        return False
    first = expression.parts[0]
    return not isinstance(first, Slot) or is_tensor(first.expression, typed)


def _is_call_of(expression: Expression, functions: tuple[str, ...]) -> bool:
    first = expression.parts[0] if isinstance(expression, Form) else None
    return isinstance(first, str) and first.rstrip("(") in functions


def _first_operands(expression: Expression, functions: tuple[str, ...]) -> Iterator[Held]:
    """Yield the plain values that are the first argument of a function."""
    if isinstance(expression, Form):
        slots = [part.expression for part in expression.parts if isinstance(part, Slot)]
        if _is_call_of(expression, functions) and slots and isinstance(slots[0], Held):
            yield slots[0]
        for slot in slots:
            yield from _first_operands(slot, functions)


def _operands(expression: Expression, functions: tuple[str, ...]) -> Iterator[Held]:
    """Yield the plain values that are the first three arguments of a function."""
    if not isinstance(expression, Form):
        return
    slots = [part.expression for part in expression.parts if isinstance(part, Slot)]
    if _is_call_of(expression, functions):
        yield from (slot for slot in slots[:3] if isinstance(slot, Held))
    for slot in slots:
        yield from _operands(slot, functions)
