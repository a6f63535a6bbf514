"""Turns a body into source lines: loops, names, and values inlined where they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from textwrap import wrap

from autopar.codegen.forward.ops.arguments import PARTS
from autopar.codegen.forward.scope import Owner
from autopar.codegen.forward.writing.naming import Namer, Shape, values_to_keep
from autopar.codegen.forward.writing.statements import Loop, Statement, rolled, statements
from autopar.codegen.text.expressions import (
    Binding,
    Expression,
    Fact,
    LocalTensor,
    SourceForm,
    comment,
    rendered,
    replaced,
)
from autopar.codegen.text.lines import Body, Pattern, values_in, wrapped
from autopar.codegen.text.values import WIDTH


def written(body: Body, owner: Owner, *, indent: int, slice_text: str | None = None) -> list[str]:
    """Return the source of a body, including its return.

    With `slice_text`, loops over layers have this text as their bounds.
    """
    modules = owner.split.modules
    lines_rolled = rolled(body.lines, owner, modules, result=body.result, slice_text=slice_text)
    rolled_body = replace(body, lines=lines_rolled)
    kept = values_to_keep(rolled_body.lines)
    rounds: list[list[LocalTensor]] = []
    lines, too_long = _attempt(rolled_body, owner, indent, kept)
    while too_long:
        rounds.append(too_long)
        lines, too_long = _attempt(rolled_body, owner, indent, kept.union(*rounds))
    added = {local for some in rounds for local in some}
    for local in chain(*rounds[:-1]):  # a name may be unnecessary after an inner value got one
        shorter, too_long = _attempt(rolled_body, owner, indent, kept | added - {local})
        if not too_long:
            added, lines = added - {local}, shorter
    return lines


def _attempt(
    body: Body, owner: Owner, indent: int, kept: frozenset[LocalTensor]
) -> tuple[list[str], list[LocalTensor]]:
    """Return the source with `kept` values named, and values in long lines to name as well."""
    found = statements(body, kept=kept)
    names = Namer(found, body, owner.split)
    writer = _Writer(found, names, body, indent)
    return writer.lines(), writer.too_long


class _Writer:
    def __init__(
        self,
        found: Sequence[Statement],
        names: Namer,
        body: Body,
        indent: int,
    ) -> None:
        self.found, self.named, self.axis, self.indent = found, names, body.axis, indent
        self.has_result = body.result is not None
        self.too_long: list[LocalTensor] = []
        self.told_parts = False  # `parts` is explained once in a body
        self.shapes: dict[LocalTensor, Shape] = {shape.value: shape for shape in names.shapes}
        self.known: Mapping[tuple[LocalTensor, str], str] = {
            (s.value, f"shape[{i}]"): s.name(i)
            for s in names.shapes
            for i in range(len(s.names))
            if s.name(i)
        }
        self.made = {local for s in found for local in values_in(s.results)}

    def lines(self) -> list[str]:
        """Return all lines with their indentation."""
        indent = self.indent
        lines = [
            " " * indent + shape.text.format(self.named.names[shape.value])
            for shape in self.named.shapes
            if shape.value not in self.made and any(shape.names)
        ]
        previous = ""
        found = self._returned_at_once() if self.has_result else self.found
        for number, statement in enumerate(found):
            is_return = self.has_result and number == len(found) - 1
            is_block = not is_return or statement.line.is_random
            block = self._block(statement) if is_block else ""
            if block and block != previous:
                lines.append(" " * indent + block)
            inner = indent + 4 if block else indent
            lines += self._return(statement, inner) if is_return else self._lines(statement, inner)
            previous = block
        return lines

    def _returned_at_once(self) -> Sequence[Statement]:
        """Return the statements; `y = …; return y` becomes one statement."""
        if len(self.found) < 2:
            return self.found
        before, last = self.found[-2:]
        is_same = isinstance(last.expression, LocalTensor) and before.results == last.expression
        is_random = not isinstance(before.line, Loop) and before.line.is_random
        is_blocked = self._block(before) != "" and not is_random
        if not is_same or is_blocked or isinstance(before.line, Loop):
            return self.found
        return [*self.found[:-2], replace(before, results=None)]

    def _block(self, statement: Statement) -> str:
        if statement.line.only_evaluates:
            return "if not self.training:"
        if not statement.line.has_gradient:
            return "with torch.no_grad():"
        return f"with split_randomness({self.axis}):" if statement.line.is_random else ""

    def _lines(self, statement: Statement, indent: int) -> Iterator[str]:
        line = statement.line
        target = _target(statement.results, self.named.names)
        expression = statement.expression
        if isinstance(line, Loop):
            for start, end in line.carried:
                before, after = self.named.names[start], self.named.names[end]
                if before != after:
                    yield f"{' ' * indent}{after} = {before}"
            yield " " * indent + line.header
            indent += 4
            carried: dict[LocalTensor, Expression] = dict(line.carried)
            expression = replaced(expression, carried.get)
        source = self._text(expression)
        prefix = f"{target} = " if target else ""
        yield from self._with_comment(prefix + source, statement, indent)
        for local in values_in(statement.results):
            if local in self.shapes and any(self.shapes[local].names):
                yield " " * indent + self.shapes[local].text.format(self.named.names[local])

    def _return(self, statement: Statement, indent: int) -> list[str]:
        source = self._text(statement.expression)
        return self._with_comment(f"return {source}", statement, indent)

    def _with_comment(self, source: str, statement: Statement, indent: int) -> list[str]:
        lines = wrapped(source, indent=indent)
        fits = len(lines) == 1 or _breaks_well(statement)
        if statement.folded and (not fits or max(map(len, lines)) > WIDTH):
            self.too_long.append(_to_be_named(statement))
        reasons = [reason for reason in map(self._untold, statement.reasons) if reason]
        if not reasons:
            return lines
        if len(reasons) == 1:
            note = f"  # {comment(reasons[0])}"
            if len(lines) == 1 and len(lines[0]) + len(note) <= WIDTH:
                return [lines[0] + note]
        notes = [comment(reason) for reason in reasons]
        margin = f"{' ' * indent}# "
        broken = [line for note in notes for line in wrap(note, WIDTH - len(margin))]
        return [*(margin + line for line in broken), *lines]

    def _untold(self, reason: str) -> str:
        """Return a reason without the explanation of `parts`, if an earlier line has that."""
        if not reason.endswith(PARTS):
            return reason
        told, self.told_parts = self.told_parts, True
        return reason.removesuffix(PARTS).removesuffix("; ") if told else reason

    def _text(self, expression: Expression) -> str:
        return rendered(expression, self._name)[0]

    def _name(self, piece: LocalTensor | Fact) -> tuple[str, Binding]:
        if isinstance(piece, LocalTensor):
            return self.named.names[piece], Binding.CALL
        known = self.known.get((piece.value, piece.what))
        return known or f"{self.named.names[piece.value]}.{piece.what}", Binding.CALL


def _target(pattern: Pattern, names: Mapping[LocalTensor, str]) -> str:
    if pattern is None:
        return ""
    if isinstance(pattern, LocalTensor):
        return names[pattern]
    items = [
        f"({_target(item, names)})" if isinstance(item, tuple) else _target(item, names) or "_"
        for item in pattern
    ]
    return ", ".join(items) + ("," if len(items) == 1 else "")


def _to_be_named(statement: Statement) -> LocalTensor:
    """Return the value to name in a long statement: an operand of its outermost operation."""
    # a return whose whole value is folded into it
    is_bare = isinstance(statement.line.expression, LocalTensor)
    inner = statement.folded[:-1] if is_bare and len(statement.folded) > 1 else statement.folded
    return inner[-1]


def _breaks_well(statement: Statement) -> bool:
    """Whether a long statement is a call with keywords, which reads well on several lines."""
    form = statement.expression
    has_keywords = isinstance(form, SourceForm) and any(
        isinstance(part, str) and part.startswith(", ") and part.endswith("=")
        for part in form.parts
    )
    return has_keywords and len(statement.folded) <= 2
