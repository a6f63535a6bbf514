"""Makes statements of a body's lines: inlines values used once, makes loops of equal layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.forward.reading.modules import Container, Modules
from autopar.codegen.forward.scope import Owner
from autopar.codegen.text.expressions import (
    Expression,
    Fact,
    LocalTensor,
    Slot,
    SourceForm,
    call,
    identifier,
    pieces,
    replaced,
    text,
)
from autopar.codegen.text.lines import Body, Line, Pattern, values_in

_MOST_OPERATIONS = 6  # operations in one statement
_MOST_UNPACKED = 3  # at most so many results of a module are unpacked if only one is used
_MOST_ARGUMENTS = 2  # of a module's call that is printed inside another call's arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A printed line, with the lines inlined into it."""

    line: Line
    expression: Expression
    results: Pattern
    reasons: tuple[str, ...]
    parts: tuple[int, ...]  # indices of `lines` in the body, in the order of evaluation
    lines: tuple[Line, ...]  # the line and the lines inlined into it, in the same order
    folded: tuple[LocalTensor, ...]  # inlined values, which need no name


def statements(body: Body, *, kept: frozenset[LocalTensor] = frozenset()) -> tuple[Statement, ...]:
    """Return the statements of a body; the last one is its return. `kept` values keep a name."""
    lines = list(body.lines)
    if body.result is not None:
        lines.append(Line(results=None, expression=body.result))
    return _Folder(_live(lines), kept).statements()


def _live(lines: Sequence[Line]) -> list[Line]:
    """Return the lines whose results are needed, and those that must keep their order."""
    needed: set[LocalTensor] = set()
    live: list[Line] = []
    for line in reversed(lines):
        made = set(values_in(line.results))
        if made and not line.is_ordered and not made & needed:
            continue
        live.append(line)
        for piece in pieces(line.expression):
            needed.add(piece if isinstance(piece, LocalTensor) else piece.value)
    return live[::-1]


class _Folder:
    def __init__(self, lines: Sequence[Line], kept: frozenset[LocalTensor]) -> None:
        self.lines = lines
        self.kept = kept
        used = [piece for line in lines for piece in pieces(line.expression)]
        self.uses = Counter(piece for piece in used if isinstance(piece, LocalTensor))
        self.facts = {piece.value for piece in used if isinstance(piece, Fact)}
        self.carried = {
            start for line in lines if isinstance(line, Loop) for start, _ in line.carried
        }
        self.made: dict[LocalTensor, Statement] = {}
        self.done: dict[int, Statement] = {}
        self.ordered = [i for i, line in enumerate(lines) if line.is_ordered]

    def statements(self) -> tuple[Statement, ...]:
        for number, line in enumerate(self.lines):
            statement = self._folded(number, line)
            self.done[number] = statement
            if isinstance(statement.results, LocalTensor):
                self.made[statement.results] = statement
        return tuple(self.done[number] for number in sorted(self.done))

    def _folded(self, number: int, line: Line) -> Statement:
        expression, results = _single(line, self.uses, self.facts)
        taken: dict[LocalTensor, Statement] = {}
        parts: list[int] = []
        for piece in pieces(expression):
            if isinstance(piece, LocalTensor) and self._may_fold(piece, line, number):
                inner = self.made[piece]
                weight = len(parts) + len(inner.parts) + 1
                if weight <= _MOST_OPERATIONS and self._keeps_order([*parts, *inner.parts], number):
                    taken[piece] = inner
                    parts += inner.parts
        folded = replaced(
            expression, lambda local: taken[local].expression if local in taken else None
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
            folded=tuple(local for piece, s in taken.items() for local in (*s.folded, piece)),
        )

    def _may_fold(self, local: LocalTensor, line: Line, number: int) -> bool:
        inner = self.made.get(local)
        if inner is None or local in self.kept or self.uses[local] != 1 or local in self.facts:
            return False
        if local in self.carried or isinstance(inner.line, Loop) or isinstance(line, Loop):
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
        """Whether ordered lines stay in order if `parts` are inlined into line `number`."""
        own = [part for part in parts if part in self.ordered]
        if not own:
            return True
        between = [i for i in self.ordered if own[0] <= i < number]
        return own == sorted(own) and own == between


def _single(
    line: Line, uses: Counter[LocalTensor], facts: set[LocalTensor]
) -> tuple[Expression, Pattern]:
    """Return a line's expression and its used results; `f(x)[0]` if only one result is used."""
    if line.results is None or isinstance(line, Loop):
        return line.expression, line.results
    needed = [local for local in values_in(line.results) if uses[local] or local in facts]
    if not isinstance(line.results, tuple):
        return line.expression, line.results if needed else None
    flat = [item for item in line.results if not isinstance(item, tuple)]
    is_unpacked = line.module is not None and 1 < len(flat) <= _MOST_UNPACKED
    if len(needed) == 1 and len(flat) == len(line.results) and not is_unpacked:
        index = line.results.index(needed[0])
        return SourceForm((Slot(line.expression), f"[{index}]")), needed[0]
    return line.expression, _without(line.results, set(needed))


def _without(pattern: Pattern, needed: set[LocalTensor]) -> Pattern:
    if isinstance(pattern, tuple):
        kept = tuple(_without(item, needed) for item in pattern)
        return kept if any(list(values_in(item)) for item in kept) else None
    return pattern if pattern in needed else None


_MEMBERS = MappingProxyType(
    {Container.INDEX: "", Container.KEY: ".values()", Container.ATTRIBUTE: ".children()"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Line):
    """A line repeated for modules of a container.

    `carried` has a pair for each value that an iteration passes to the next: the value before the
    loop, and the one after it.
    """

    header: str
    carried: tuple[tuple[LocalTensor, LocalTensor], ...]
    bounds: tuple[int, int]  # of the modules in their container


def rolled(
    lines: Sequence[Line],
    owner: Owner,
    modules: Modules,
    *,
    result: Expression | None,
    slice_text: str | None = None,
) -> tuple[Line, ...]:
    """Return the lines with runs of equal calls as loops; `result` is returned afterwards.

    With `slice_text`, even a single call of a module in a container is a loop, and the text is its
    bounds.
    """
    lines = [*lines, Line(results=None, expression=result)] if result is not None else lines
    done: list[Line] = []
    position = 0
    while position < len(lines):
        run = _run(lines[position:])
        is_loop = len(run) > 1 or (slice_text is not None and _is_indexed(run[0]))
        if is_loop and not _is_listed(run[0], modules):
            is_loop, run = False, run[:1]
        if is_loop:
            later = _used(lines[position + len(run) :])
            done.append(_loop(run, later, owner, modules, slice_text))
        else:
            done.append(lines[position])
        position += max(1, len(run))
    return tuple(done[:-1] if result is not None else done)


def _run(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the longest beginning of some lines that one loop can replace."""
    length = 1
    carries: dict[int, int] | None = None
    while length < len(lines):
        found = _carries(lines[length - 1], lines[length])
        if found is None or (carries is not None and found != carries):
            break
        if _used(lines[length + 1 :]) & (set(values_in(lines[length - 1].results))):
            break  # later lines need a result that the loop would overwrite
        carries, length = found, length + 1
    return lines[:length]


def _carries(before: Line, after: Line) -> dict[int, int] | None:
    """Map a call's arguments to results of the call before, by index; None if no loop fits."""
    if before.module is None or after.module is None or not _is_next(before.module, after.module):
        return None
    is_like = before.is_random == after.is_random and before.has_gradient == after.has_gradient
    names_before = [name for name, _ in before.arguments]
    if not is_like or names_before != [name for name, _ in after.arguments]:
        return None
    results, made = _flat(before.results), _flat(after.results)
    carries: dict[int, int] = {}
    for i, ((_, a), (_, b)) in enumerate(zip(before.arguments, after.arguments, strict=True)):
        if isinstance(b, LocalTensor) and b in results and isinstance(a, LocalTensor):
            if a.layout != b.layout or len(made) != len(results) or made[results.index(b)] is None:
                return None  # the last iteration may return fewer values than are carried
            carries[i] = results.index(b)
        elif a != b:
            return None
    is_same_shape = _shape(before.results) == _shape(after.results)
    return carries if carries and is_same_shape else None


def _is_next(before: str, after: str) -> bool:
    stem, _, number = before.rpartition(".")
    other, _, next_number = after.rpartition(".")
    digits = number.isdigit() and next_number.isdigit()
    return stem == other and digits and int(next_number) == int(number) + 1


def _is_indexed(line: Line) -> bool:
    """Whether a line calls a numbered module that takes and returns a tensor."""
    is_number = (line.module or "").rpartition(".")[2].isdigit()
    return is_number and bool(_sole_carries(line))


def _is_listed(line: Line, modules: Modules) -> bool:
    """Whether the modules' numbers in a container are their positions."""
    stem, _, _ = (line.module or "").rpartition(".")
    place = f"{stem}." if stem else ""
    inner = (path.removeprefix(place) for path in modules if path and path.startswith(place))
    names = [name for name in inner if "." not in name]
    return names == [str(number) for number in range(len(names))]


def _sole_carries(line: Line) -> dict[int, int]:
    """Return what a loop with one iteration carries: the first tensor argument and result."""
    first = next((i for i, (_, v) in enumerate(line.arguments) if isinstance(v, LocalTensor)), None)
    results = [i for i, local in enumerate(_flat(line.results)) if local is not None]
    return {first: results[0]} if first is not None and results else {}


def _loop(
    run: Sequence[Line],
    later: set[LocalTensor],
    owner: Owner,
    modules: Modules,
    slice_text: str | None,
) -> Loop:
    first, last = run[0], run[-1]
    carries = _carries(first, run[1]) if len(run) > 1 else _sole_carries(first)
    assert carries is not None
    begin, end = (_number(line.module) for line in (first, last))
    made = _flat(last.results)
    carried: list[tuple[LocalTensor, LocalTensor]] = []
    for argument, result in carries.items():
        start, end_of = first.arguments[argument][1], made[result]
        assert isinstance(start, LocalTensor)
        assert end_of is not None, "what is carried is returned"
        carried.append((start, end_of))
    results = {end for _, end in carried}
    variable = _variable(modules, last.module or "")
    arguments = [(name, value) for name, value in first.arguments]
    kept = _kept(last.results, results | later)
    names = zip(values_in(last.results), last.names, strict=True)
    return Loop(
        results=kept,
        expression=call(
            text(variable),
            *[value for name, value in arguments if not name],
            keywords=tuple((name, value) for name, value in arguments if name),
        ),
        is_ordered=any(line.is_ordered for line in run),
        has_gradient=first.has_gradient,
        is_random=first.is_random,
        hint=first.hint,
        names=tuple(own for local, own in names if local in values_in(kept)),
        module=first.module,
        arguments=first.arguments,
        header=f"for {variable} in {_container(first, last, owner, slice_text)}:",
        carried=tuple(carried),
        bounds=(begin, end + 1),
    )


def _number(path: str | None) -> int:
    return int((path or "").rpartition(".")[2])


def _container(first: Line, last: Line, owner: Owner, slice_text: str | None) -> str:
    """Return the expression of a loop's modules; only torch's lists are sliced directly."""
    path = (first.module or "").rpartition(".")[0]
    cut, module = _slice(first, last, owner, slice_text), owner.split.modules[path]
    place = f"self{owner.steps(path)}{_MEMBERS[module.container]}"
    is_sliced = module.is_torch and module.container is Container.INDEX
    return f"list({place}){cut}" if cut and not is_sliced else f"{place}{cut}"


def _slice(first: Line, last: Line, owner: Owner, slice_text: str | None) -> str:
    """Return `[4:8]`, or "" for all modules of a container."""
    if slice_text is not None:
        return f"[{slice_text}]"
    stem = (first.module or "").rpartition(".")[0]
    begin, end = _number(first.module), _number(last.module) + 1
    place = re.escape(f"{stem}." if stem else "")
    members = [path for path in owner.split.modules if re.fullmatch(rf"{place}\d+", path)]
    bounds = f"{begin or ''}:{end if end < len(members) else ''}"
    return "" if bounds == ":" else f"[{bounds}]"


def _variable(modules: Modules, path: str) -> str:
    """Return the last word of the class's name: `block` for EncoderBlock."""
    module = modules.get(path)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", module.class_name if module else "")
    return identifier(words[-1]) if words else "module"


def _flat(pattern: Pattern) -> list[LocalTensor | None]:
    if isinstance(pattern, tuple):
        return [local for item in pattern for local in _flat(item)]
    return [pattern]


def _shape(pattern: Pattern) -> object:
    return tuple(map(_shape, pattern)) if isinstance(pattern, tuple) else "."


def _kept(pattern: Pattern, wanted: set[LocalTensor]) -> Pattern:
    if isinstance(pattern, tuple):
        return tuple(_kept(item, wanted) for item in pattern)
    return pattern if pattern in wanted else None


def _used(lines: Iterable[Line]) -> set[LocalTensor]:
    return {
        piece if isinstance(piece, LocalTensor) else piece.value
        for line in lines
        for piece in pieces(line.expression)
    }
