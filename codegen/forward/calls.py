"""Prints calls of modules and functions, with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar.codegen.forward.opening import is_changed, is_split_random, may_read_parts
from autopar.codegen.forward.reading.forward_source import as_tuple, is_mapping, pairs
from autopar.codegen.forward.reading.modules import (
    Imported,
    is_free,
    is_number,
    named_functions,
)
from autopar.codegen.forward.scope import AvailableValues, PrintAgainError
from autopar.codegen.text.expressions import (
    Expression,
    LocalTensor,
    SourceForm,
    call,
    literal,
    mapped,
    sequence,
    text,
)
from autopar.codegen.text.lines import Line, Pattern, values_in
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import (
    LOSS_FUNCTION,
    MODULE,
    DType,
    Extent,
    FunctionCall,
    Mapped,
    ModuleCall,
    Op,
    Ref,
    TensorOrigin,
    Value,
    objects,
    refs,
)
from autopar.planner.rules.rule import is_random


def _reject(value: Value) -> Expression:
    raise AssertionError(f"{value!r} cannot be printed")


def printed_argument(
    value: Value,
    other: Value,
    body: AvailableValues,
    *,
    tensor: Callable[[str], Expression],
    rest: Callable[[Value], Expression] = _reject,
) -> Expression:
    """Print an argument.

    `other` is the same argument in the second trace (of inputs of other lengths): a number that
    differs there is a size. `tensor` prints tensors, `rest` anything else: strings, objects.
    """

    def inner(one: Value, two: Value) -> Expression:
        return printed_argument(one, two, body, tensor=tensor, rest=rest)

    if isinstance(value, Ref):
        return tensor(value.tensor)
    if isinstance(value, Mapped):
        assert isinstance(other, Mapped)
        shown = zip(pairs(value), pairs(other), strict=True)
        return mapped((literal(key), inner(one, two)) for (key, one), (_, two) in shown)
    if isinstance(value, tuple) and not is_mapping(value):
        assert isinstance(other, tuple)
        given = sequence(value, tuple(map(inner, value, other)))
        return text(body.containers[given]) if given in body.containers else given
    if value is None or isinstance(value, (bool, int, float, Extent)):
        return body.plain_size(value, other)
    if isinstance(value, DType):
        own = body.dtype() if value.name == "model" else None
        return own if own is not None else text(f"torch.{value.name}")
    return rest(value)


LOSS = "compute_loss"  # the scripts' name for the model file's loss
# argument → the tensor to pass, its layout, and an op that reads it
_Needs = dict[str, tuple[str, Layout, Op | None]]
_KEPT = (TensorOrigin.PARAMETER, TensorOrigin.BUFFER)


def function_line(function: FunctionCall, ops: Sequence[Op], body: AvailableValues) -> Line | None:
    """Return a line that calls the author's function, or None if its ops must be printed."""
    name = _name(function, body)
    values = (*function.arguments, *(value for _, value in function.keywords))
    if not name or not all(map(_is_plain, values)) or not _is_right_unchanged(function, ops, body):
        return None
    takes_size = any(map(_has_size, values))
    if (takes_size or _reads_sizes(function, body)) and may_read_parts(ops, body.split):
        return None
    needs = _needs(function, ops, body)
    if needs is None:
        return None
    other = body.split.lengths.function(function)

    def printed(value: Value, more: Value) -> Expression:
        own = body.owner.setting(function.call, function.spans[:1], value)
        return own or _function_argument(value, needs, body, more)

    arguments = map(printed, function.arguments, other.arguments)
    keywords = tuple(
        (key, printed(value, more))
        for (key, value), (_, more) in zip(function.keywords, other.keywords, strict=True)
    )
    made = {tensor for op in ops for tensor in op.outputs}
    return Line(
        results=_function_pattern(function.result, made, body),
        expression=call(name, *arguments, keywords=keywords),
        has_gradient=ops[0].grad_enabled,
        hint=function.name,
        function=name,
    )


def _imported(function: FunctionCall) -> Imported:
    return Imported(module=function.module, qualname=function.name, name=function.name)


def _reads_sizes(function: FunctionCall, body: AvailableValues) -> bool:
    if (function.module, function.name) == LOSS_FUNCTION:
        return True
    return named_functions(body.graph, body.split.modules).get(_imported(function), False)


def _has_size(value: Value) -> bool:
    """Whether an argument contains a number that may be a tensor's size."""
    if isinstance(value, tuple):
        return any(map(_has_size, _items(value)))
    return isinstance(value, Extent) or type(value) is int


def _name(function: FunctionCall, body: AvailableValues) -> str:
    """Return a function's name in the script, or "" if it cannot be imported."""
    if (function.module, function.name) == LOSS_FUNCTION:
        return LOSS
    known, place = named_functions(body.graph, body.split.modules), _imported(function)
    others = [one for one in known if one.name == place.name and one != place]
    is_taken = others or place.name in (*body.arguments.values(), *body.unpacked)
    return place.name if place in known and not is_taken and is_free(place.name) else ""


def _is_plain(value: Value) -> bool:
    """Whether an argument consists of tensors, numbers, dtypes and containers of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, _items(value)))
    return value is None or isinstance(value, (Ref, DType, Extent, bool, int, float))


def _items(value: tuple[Value, ...]) -> Sequence[Value]:
    return [item for _, item in pairs(value)] if isinstance(value, Mapped) else value


def _is_right_unchanged(function: FunctionCall, ops: Sequence[Op], body: AvailableValues) -> bool:
    """Whether the author's function, called on a rank's tensors, computes what the plan wants."""
    split = body.split
    made = {tensor for op in ops for tensor in op.outputs}
    layouts = [split.made(tensor) for tensor in made]
    if any(layout.kind is LayoutKind.PARTIAL for layout in layouts):
        return False
    if any(_is_special(op, body) for op in ops) or len({op.grad_enabled for op in ops}) > 1:
        return False
    pairs = ((op, i) for op in ops for i, name in enumerate(op.inputs) if name in made)
    if any(len(split.layouts_of(op, i)) > 1 for op, i in pairs):
        return False
    names = {op.name for op in ops}
    read_outside = {
        tensor
        for tensor in made
        if tensor == body.graph.loss
        or any(user.name not in names for user in body.graph.index.readers[tensor])
    }
    return read_outside <= set(refs(function.result))


def _is_special(op: Op, body: AvailableValues) -> bool:
    """Whether an op must be printed differently from the code of the author's function."""
    return (
        is_changed(op, body.split)
        or is_random(op)
        or bool(op.writes)
        or body.reads_written(op)
        or op.name in body.split.weighed
    )


def _needs(function: FunctionCall, ops: Sequence[Op], body: AvailableValues) -> _Needs | None:
    """Return for each argument the tensor to pass, its layout, and an op that reads it.

    If no op reads an argument, the function takes only a dtype, a device or a size from it, so any
    similar tensor will do.
    """
    split, tensors = body.split, body.graph.tensors
    made = {tensor for op in ops for tensor in op.outputs}
    wanted: dict[str, tuple[Layout, Op]] = {}
    for op in ops:
        for i, tensor in enumerate(op.inputs):
            need = split.need(op, i)
            if tensor not in made and wanted.setdefault(tensor, (need, op))[0] != need:
                return None
    values = (function.arguments, tuple(value for _, value in function.keywords))
    given = dict.fromkeys(refs(values))
    others = (tensors[name].origin for name in wanted.keys() - given.keys())
    if any(origin is not TensorOrigin.CONSTANT for origin in others):
        return None
    found: _Needs = {}
    for name in given:
        if name in wanted:
            layout, op = wanted[name]
            if name not in body.have and tensors[name].origin not in _KEPT:
                return None
            found[name] = name, layout, op
            continue
        like = _like(name, body, needs_sizes=_reads_sizes(function, body))
        if like is None:
            return None
        found[name] = like, body.have[like], None
    return found


def _like(name: str, body: AvailableValues, *, needs_sizes: bool) -> str | None:
    """Return an available value of a tensor's dtype and, with `needs_sizes`, of its shape."""
    tensors = body.graph.tensors
    if name not in tensors:
        return None
    for one in (name, *body.have) if name in body.have else body.have:
        is_whole = body.have[one] == WHOLE and tensors[one].shape == tensors[name].shape
        if tensors[one].dtype == tensors[name].dtype and (is_whole or not needs_sizes):
            return one
    return None


def _function_argument(
    value: Value, needs: _Needs, body: AvailableValues, other: Value
) -> Expression:
    def tensor(name: str) -> Expression:
        own, layout, reader = needs[name]
        return LocalTensor(own, layout) if reader is None else body.value(own, layout, reader)

    return printed_argument(value, other, body, tensor=tensor)


def _function_pattern(value: Value, made: set[str], body: AvailableValues) -> Pattern:
    if isinstance(value, Ref):
        is_new = value.tensor in made and value.tensor in body.graph.tensors
        return LocalTensor(value.tensor, body.split.made(value.tensor)) if is_new else None
    if isinstance(value, tuple) and not isinstance(value, Mapped):
        return tuple(_function_pattern(item, made, body) for item in value)
    return None


def call_line(unit: str, body: AvailableValues) -> Line:
    """Return the line that calls a module or an autograd Function."""
    record = body.graph.calls[unit]
    ops = body.tree.ops.get(unit, ())
    has_size = any(map(_has_size, (*record.arguments, *dict(record.keywords).values())))
    # the second trace only tells sizes from other numbers
    others = (body.split.lengths.call(unit) if has_size else None) or record
    by_name = dict(others.keywords)
    arguments = [
        (name, _argument(value, unit, body, by_name[name] if name else others.arguments[place]))
        for place, (name, value) in enumerate(_given(unit, body))
    ]
    results = _pattern(record.result, unit, body)
    positional = [value for name, value in arguments if not name]
    keywords = tuple((name, value) for name, value in arguments if name)
    draws = [op for op in ops if is_random(op) and not body.opening.prints(op, unit)]
    return Line(
        results=results,
        expression=call(_target(unit, body), *positional, keywords=keywords),
        is_ordered=any(is_random(op) or op.writes or body.reads_written(op) for op in ops),
        has_gradient=any(op.grad_enabled for op in ops),
        is_random=any(is_split_random(op, body.split) for op in draws),
        hint=record.path.rpartition(".")[2],
        names=tuple(
            body.tree.names_in(body.scope, one.tensor, without=unit) for one in values_in(results)
        ),
        module=record.path,
        arguments=tuple(arguments),
    )


def _given(unit: str, body: AvailableValues) -> Iterator[tuple[str, Value]]:
    """Yield (name, value) of the arguments that a printed call needs; "" names positional ones."""
    record = body.graph.calls[unit]
    positional = list(record.arguments)
    if not record.is_function:
        declared = body.split.modules[record.path].arguments
        while positional and len(positional) <= len(declared):
            last = declared[len(positional) - 1]
            if last.kind.name != "POSITIONAL_OR_KEYWORD" or not last.is_default(positional[-1]):
                break
            positional.pop()
    yield from (("", value) for value in positional)
    for name, value in record.keywords:
        if not _is_left_out(name, value, unit, body):
            yield name, value


def _target(unit: str, body: AvailableValues) -> SourceForm:
    """Return the callee: a module inside `self`, or an autograd Function by its name."""
    record = body.graph.calls[unit]
    if not record.is_function:
        if body.owner.within(record.path) is None:
            raise PrintAgainError.for_module(record.path, body.scope)
        return SourceForm(tuple(body.owner.path(record.path).parts))
    owner = body.split.modules.get(record.path.rpartition("/")[0])
    known = named_functions(body.graph, body.split.modules) if owner is None else owner.functions
    if all(one.name != record.class_name for one in known):
        raise unnamed_function(record, body.tree.ops[unit][0])
    return SourceForm((f"{record.class_name}.apply",))


def unnamed_function(record: ModuleCall, op: Op) -> InputError:
    """Return the error for a Function that printed code cannot call."""
    return InputError(
        f"{record.class_name} is a torch.autograd.Function in code that must be rewritten",
        where=op.location,
        fix="call it in the forward of a module whose file defines or imports it, or pin that "
        "module whole",
    )


def _is_left_out(name: str, value: Value, unit: str, body: AvailableValues) -> bool:
    """Whether a keyword argument may be left out: it has its default, or training does not need it.

    Training does not need empty caches for later calls, nor arguments that the module's printed
    code does not read.
    """
    is_opened = unit in body.opening.opened
    for argument in body.split.modules[body.graph.calls[unit].path].arguments:
        if argument.name == name:
            is_object = isinstance(value, str) and any(objects(value))
            is_unread = is_opened or str(value).endswith("Cache>")
            return argument.is_default(value) or (
                argument.default is not None and is_object and is_unread
            )
    return is_opened and is_number(value)  # its printed code contains the number


def _argument(value: Value, unit: str, body: AvailableValues, other: Value) -> Expression:
    return printed_argument(
        value,
        other,
        body,
        tensor=lambda name: _handed(name, unit, body),
        rest=lambda one: _object(one, unit, body),
    )


def _object(value: Value, unit: str, body: AvailableValues) -> Expression:
    """Print a string or an object: a module inside `self` by its path, other objects as None."""
    if is_mapping(value):
        raise PrintAgainError(unit, reason="a mapping that is no dict")
    for name in objects(value):
        if name.startswith(MODULE):
            available = body.owner.within(name.removeprefix(MODULE))
            if available is not None:
                return body.owner.path(available)
        if unit not in body.opening.opened:
            raise PrintAgainError(unit, reason=f"it takes a {name}", lacks_argument=True)
        return literal(None)
    assert isinstance(value, (str, complex))
    return literal(value)


def _handed(tensor: str, unit: str, body: AvailableValues) -> Expression:
    origin = body.graph.tensors[tensor].origin if tensor in body.graph.tensors else None
    if origin is None:  # the loss does not depend on it, so it is not computed
        if unit not in body.opening.opened:
            raise PrintAgainError(unit, reason=f"it takes {tensor}", lacks_argument=True)
        return literal(None)
    if origin in (TensorOrigin.OP, TensorOrigin.INPUT) and tensor not in body.have:
        raise PrintAgainError(unit)
    return body.value(tensor, body.opening.entry(unit, tensor))


def _pattern(value: Value, unit: str, body: AvailableValues) -> Pattern:
    if isinstance(value, Ref):
        maker = body.graph.index.made_by.get(value.tensor)
        if maker is None or not body.tree.is_inside(maker, unit):
            return None
        return LocalTensor(value.tensor, body.opening.arrives(value.tensor, body.scope))
    value = as_tuple(value)
    if isinstance(value, tuple):
        if is_mapping(value):
            raise PrintAgainError(unit)
        return tuple(_pattern(item, unit, body) for item in value)
    return None
