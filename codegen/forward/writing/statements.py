"""Puts values that are used once where they are used, so that lines read like written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    Form,
    Held,
    Slot,
    pieces,
    replaced,
)
from autopar.codegen.forward.text.lines import Body, Line, Pattern, held_in
from autopar.codegen.forward.writing.loops import Loop

_HEAVIEST = 6  # operations in one statement
_MOST_UNPACKED = 3  # results of a module's call, of which one is used
_MOST_ARGUMENTS = 2  # of a module's call inside of another one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A line that is printed: what stands in it was used nowhere else."""

    line: Line
    expression: Expression
    results: Pattern
    reasons: tuple[str, ...]
    parts: tuple[int, ...]  # the numbers of the lines in it, in the order of evaluation
    lines: tuple[Line, ...]  # these lines
    folded: tuple[Held, ...]  # the values that got no name


def statements(body: Body, *, kept: frozenset[Held] = frozenset()) -> tuple[Statement, ...]:
    """Return the statements of a body; the last one is its return; `kept` values keep a name."""
    lines = list(body.lines)
    if body.result is not None:
        lines.append(Line(results=None, expression=body.result))
    return _Folder(_live(lines), kept).statements()


def _live(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that something depends on."""
    needed: set[Held] = set()
    live: list[Line] = []
    for line in reversed(lines):
        made = set(held_in(line.results))
        if made and not line.is_ordered and not made & needed:
            continue
        live.append(line)
        for piece in pieces(line.expression):
            needed.add(piece if isinstance(piece, Held) else piece.held)
    return live[::-1]


class _Folder:
    def __init__(self, lines: Sequence[Line], kept: frozenset[Held]) -> None:
        self.lines = lines
        self.kept = kept
        used = [piece for line in lines for piece in pieces(line.expression)]
        self.uses = Counter(piece for piece in used if isinstance(piece, Held))
        self.facts = {piece.held for piece in used if isinstance(piece, Fact)}
        self.carried = {
            start for line in lines if isinstance(line, Loop) for start, _ in line.carried
        }
        self.made: dict[Held, Statement] = {}
        self.done: dict[int, Statement] = {}
        self.ordered = [i for i, line in enumerate(lines) if line.is_ordered]

    def statements(self) -> tuple[Statement, ...]:
        for number, line in enumerate(self.lines):
            statement = self._folded(number, line)
            self.done[number] = statement
            if isinstance(statement.results, Held):
                self.made[statement.results] = statement
        return tuple(self.done[number] for number in sorted(self.done))

    def _folded(self, number: int, line: Line) -> Statement:
        expression, results = _single(line, self.uses, self.facts)
        taken: dict[Held, Statement] = {}
        parts: list[int] = []
        for piece in pieces(expression):
            if isinstance(piece, Held) and self._may_fold(piece, line, number):
                inner = self.made[piece]
                weight = len(parts) + len(inner.parts) + 1
                if weight <= _HEAVIEST and self._keeps_order([*parts, *inner.parts], number):
                    taken[piece] = inner
                    parts += inner.parts
        folded = replaced(
            expression, lambda held: taken[held].expression if held in taken else None
        )
        for inner in taken.values():
            del self.done[inner.parts[-1]]
        reasons = [reason for inner in taken.values() for reason in inner.reasons]
        return Statement(
            line=line,
            expression=folded,
            results=results,
            reasons=tuple(dict.fromkeys([*reasons, *([line.reason] if line.reason else [])])),
            parts=(*parts, number),
            lines=(*(one for inner in taken.values() for one in inner.lines), line),
            folded=tuple(held for piece, s in taken.items() for held in (*s.folded, piece)),
        )

    def _may_fold(self, held: Held, line: Line, number: int) -> bool:
        inner = self.made.get(held)
        if inner is None or held in self.kept or self.uses[held] != 1 or held in self.facts:
            return False
        if held in self.carried or isinstance(inner.line, Loop) or isinstance(line, Loop):
            return False
        is_long = inner.line.module is not None and len(inner.line.arguments) > _MOST_ARGUMENTS
        if is_long and line.module is not None:
            return False
        is_like = (
            inner.line.has_gradient == line.has_gradient or line.results is None
        ) and inner.line.is_random == line.is_random
        is_return = number == len(self.lines) - 1
        return is_like and not (is_return and not inner.line.has_gradient)

    def _keeps_order(self, parts: Sequence[int], number: int) -> bool:
        """Whether what must stay in order does: it is in line, and nothing ordered is between."""
        own = [part for part in parts if part in self.ordered]
        if not own:
            return True
        between = [i for i in self.ordered if own[0] <= i < number]
        return own == sorted(own) and own == between


def _single(line: Line, uses: Counter[Held], facts: set[Held]) -> tuple[Expression, Pattern]:
    """Return `f(x)[0]` for a call of whose results only one is used, and drop unused results."""
    if line.results is None or isinstance(line, Loop):
        return line.expression, line.results
    needed = [held for held in held_in(line.results) if uses[held] or held in facts]
    if not isinstance(line.results, tuple):
        return line.expression, line.results if needed else None
    flat = [item for item in line.results if not isinstance(item, tuple)]
    is_unpacked = line.module is not None and 1 < len(flat) <= _MOST_UNPACKED
    if len(needed) == 1 and len(flat) == len(line.results) and not is_unpacked:
        index = line.results.index(needed[0])
        return Form((Slot(line.expression), f"[{index}]")), needed[0]
    return line.expression, _without(line.results, set(needed))


def _without(pattern: Pattern, needed: set[Held]) -> Pattern:
    if isinstance(pattern, tuple):
        kept = tuple(_without(item, needed) for item in pattern)
        return kept if any(list(held_in(item)) for item in kept) else None
    return pattern if pattern in needed else None
