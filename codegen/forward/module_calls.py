"""Prints the call of a module whose code stays its own, or stands in a class of its own."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.at_hand import AtHand
from autopar.codegen.forward.call_arguments import printed_argument
from autopar.codegen.forward.opening.changes import is_split_random
from autopar.codegen.forward.owned import NeedsInlineError
from autopar.codegen.forward.reading.modules import is_number
from autopar.codegen.forward.reading.results import as_tuple, is_mapping
from autopar.codegen.forward.text.expressions import (
    Expression,
    Form,
    Held,
    call,
)
from autopar.codegen.forward.text.lines import Line, Pattern
from autopar.codegen.forward.text.literals import literal
from autopar.planner.errors import InputError
from autopar.planner.ops import MODULE, Call, Op, Origin, Ref, Value, objects
from autopar.planner.rules.random_ops import is_random


def call_line(unit: str, body: AtHand) -> Line:
    """Return the call of a module that is called as a whole."""
    record = body.graph.calls[unit]
    ops = body.tree.ops.get(unit, ())
    others = body.split.lengths.call(unit) or record
    by_name = dict(others.keywords)
    arguments = [
        (name, _argument(value, unit, body, by_name[name] if name else others.arguments[place]))
        for place, (name, value) in enumerate(_given(unit, body))
    ]
    results = _pattern(record.result, unit, body)
    target = _target(unit, body)
    positional = [value for name, value in arguments if not name]
    keywords = tuple((name, value) for name, value in arguments if name)
    draws = [op for op in ops if is_random(op) and not body.opening.cares_for(op, unit)]
    return Line(
        results=results,
        expression=call(target, *positional, keywords=keywords),
        is_ordered=any(is_random(op) for op in ops)
        or any(op.writes or body.reads_written(op) for op in ops),
        has_gradient=any(op.grad_enabled for op in ops),
        is_random=any(is_split_random(op, body.split) for op in draws),
        hint=record.path.rpartition(".")[2],
        module=record.path,
        arguments=tuple(arguments),
    )


def _given(unit: str, body: AtHand) -> Iterator[tuple[str, Value]]:
    """Yield the arguments of a call, "" for a name where it has none, as far as they tell."""
    record = body.graph.calls[unit]
    positional = list(record.arguments)
    if not record.is_function:
        declared = body.split.modules[record.path].arguments
        while positional and len(positional) <= len(declared):
            last = declared[len(positional) - 1]
            if last.kind is not last.kind.POSITIONAL_OR_KEYWORD or not last.is_said(positional[-1]):
                break
            positional.pop()
    yield from (("", value) for value in positional)
    for name, value in record.keywords:
        if not _is_left_out(name, value, unit, body):
            yield name, value


def _target(unit: str, body: AtHand) -> Form:
    """Return what is called: a module that the owner holds, or an autograd Function by its name."""
    record = body.graph.calls[unit]
    if not record.is_function:
        if body.owner.within(record.path) is None:
            raise NeedsInlineError.for_module(record.path, body.scope, body.graph)
        return Form(tuple(body.owner.path(record.path).parts))
    owner = body.split.modules.get(record.path.rpartition("/")[0])
    if owner is None or all(one.name != record.class_name for one in owner.functions):
        raise unnamed_function(record, body.tree.ops[unit][0])
    return Form((f"{record.class_name}.apply",))


def unnamed_function(record: Call, op: Op) -> InputError:
    """Return the error for a Function that printed code cannot call."""
    return InputError(
        f"{record.class_name} is a torch.autograd.Function in code that must be rewritten",
        where=op.location,
        fix="call it in the forward of a module, from the file that names it, or pin that module "
        "whole",
    )


def _is_left_out(name: str, value: Value, unit: str, body: AtHand) -> bool:
    """Whether a keyword says what the signature says anyway, or nothing that training needs.

    That is an empty cache for later calls, and what printed code of the module does not read.
    """
    is_opened = unit in body.opening.opened
    for argument in body.split.modules[body.graph.calls[unit].path].arguments:
        if argument.name == name:
            is_object = isinstance(value, str) and any(objects(value))
            is_unread = is_opened or str(value).endswith("Cache>")
            return argument.is_said(value) or (
                argument.default is not None and is_object and is_unread
            )
    return is_opened and is_number(value)  # its printed code has that number itself


def _argument(value: Value, unit: str, body: AtHand, other: Value) -> Expression:
    return printed_argument(
        value,
        other,
        body,
        tensor=lambda name: _handed(name, unit, body),
        rest=lambda one: _object(one, unit, body),
    )


def _object(value: Value, unit: str, body: AtHand) -> Expression:
    """Print text, nothing, or an object: a module of the owner, None for one that is not read."""
    if is_mapping(value):
        raise NeedsInlineError(unit, body.graph.calls[unit], reason="a mapping that is no dict")
    for name in objects(value):
        if name.startswith(MODULE):
            at_hand = body.owner.within(name.removeprefix(MODULE))
            if at_hand is not None:
                return body.owner.path(at_hand)
        if unit not in body.opening.opened:
            raise NeedsInlineError(unit, body.graph.calls[unit], reason=f"<{name}>")
        return literal(None)
    assert isinstance(value, (str, complex))
    return literal(value)


def _handed(tensor: str, unit: str, body: AtHand) -> Expression:
    origin = body.graph.tensors[tensor].origin if tensor in body.graph.tensors else None
    if origin is None:  # nothing that the loss depends on, so it is not computed at all
        if unit not in body.opening.opened:
            raise NeedsInlineError(unit, body.graph.calls[unit], reason=f"<{tensor}>")
        return literal(None)
    if origin in (Origin.OP, Origin.INPUT) and tensor not in body.have:
        raise NeedsInlineError(unit, body.graph.calls[unit])
    return body.value(tensor, body.opening.entry(unit, tensor))


def _pattern(value: Value, unit: str, body: AtHand) -> Pattern:
    if isinstance(value, Ref):
        maker = body.graph.index.made_by.get(value.tensor)
        if maker is None or not body.tree.is_inside(maker, unit):
            return None
        return Held(value.tensor, body.opening.arrives(value.tensor, body.scope))
    value = as_tuple(value)
    if isinstance(value, tuple):
        if is_mapping(value):
            raise NeedsInlineError(unit, body.graph.calls[unit])
        return tuple(_pattern(item, unit, body) for item in value)
    return None
