"""Ops that are written in a way of their own: indexing, powers, what depends on training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.codegen.forward.ops import table
from autopar.codegen.forward.ops.arguments import Arguments, by_schema, function_call
from autopar.codegen.forward.text.expressions import (
    Expression,
    Form,
    Level,
    Slot,
    attribute,
    binary,
    call,
    indexed,
    joined,
    method,
    power,
)
from autopar.codegen.forward.text.literals import literal
from autopar.planner.ops import DType

_SMALL = 1e6  # whole numbers below are written without a point


def _dropout(arguments: Arguments) -> Form:
    rate = arguments.place.rate or arguments["p"]
    training = arguments.place.training if arguments.raw["train"] else literal(value=False)
    return call("F.dropout", arguments["input"], rate, training)


def _attention(arguments: Arguments) -> Form:
    if arguments.place.scale is not None:
        arguments.printed["scale"] = arguments.place.scale
    if arguments.raw["dropout_p"] != 0.0:
        rate = arguments.place.rate or arguments["dropout_p"]
        while_training = (Slot(rate), " if ", Slot(arguments.place.training), " else 0.0")
        arguments.printed["dropout_p"] = Form(while_training, Level.CHOICE)
    return function_call(arguments, table.FUNCTIONS["scaled_dot_product_attention"])


def _batch_norm(arguments: Arguments) -> Form:
    if arguments.raw["training"]:
        arguments.printed["training"] = arguments.place.training
    return function_call(arguments, table.FUNCTIONS["batch_norm"])


def _subtract_from(arguments: Arguments) -> Form:
    if arguments.raw.get("alpha", 1) != 1:
        return by_schema(arguments, "rsub")
    return binary(arguments["other"], "-", arguments["self"], Level.SUM)


def _flatten(arguments: Arguments) -> Form:
    if arguments.raw["end_dim"] == -1:
        return by_schema(arguments, "flatten")
    return method(arguments["self"], "flatten", arguments["start_dim"], arguments["end_dim"])


def _pad(arguments: Arguments) -> Form:
    if arguments.raw["value"] == 0:
        arguments.raw["value"] = None  # the default, in other words
    value = arguments.raw["value"]
    if isinstance(value, float) and value.is_integer() and abs(value) < _SMALL:
        arguments.printed["value"] = literal(int(value))  # which torch hands on as a float
    return function_call(arguments, table.FUNCTIONS["pad"])


def _power(arguments: Arguments) -> Form:
    return power(arguments["self"], arguments["exponent"])


def _convert(arguments: Arguments) -> Form:
    dtype = arguments.raw["dtype"]
    assert isinstance(dtype, DType)
    shorthand = table.DTYPE_METHODS.get(dtype.name)
    if shorthand is not None and arguments.is_default("copy"):
        return method(arguments["self"], shorthand)
    keywords = () if arguments.is_default("copy") else (("copy", arguments["copy"]),)
    return method(arguments["self"], "to", arguments["dtype"], keywords=keywords)


def _transposed(arguments: Arguments) -> Form:
    return attribute(arguments["self"], "mT" if arguments.op.target == "aten.mT.default" else "T")


def _tensordot(arguments: Arguments) -> Form:
    dims = joined((arguments["dims_self"], arguments["dims_other"]))
    return call(
        "torch.tensordot", arguments["self"], arguments["other"], keywords=(("dims", dims),)
    )


def _select(arguments: Arguments) -> Form:
    dim = arguments.raw["dim"]
    assert isinstance(dim, int)
    return indexed(arguments["self"], _at(dim, arguments["index"]))


def _slice(arguments: Arguments) -> Form:
    dim, start, end = (arguments.raw[name] for name in ("dim", "start", "end"))
    assert isinstance(dim, int)
    bounds: list[str | Slot] = []
    if start not in (None, 0):
        bounds.append(Slot(arguments["start"]))
    bounds.append(":")
    if end is not None and not (isinstance(end, int) and end >= 2**62):
        bounds.append(Slot(arguments["end"]))
    if arguments.raw["step"] != 1:
        bounds += [":", Slot(arguments["step"])]
    return indexed(arguments["self"], _at(dim, Form(tuple(bounds))))


def _at(dim: int, index: Expression) -> Form:
    """Return the index of one dim, with colons (or dots) for the dims before it."""
    if dim == -1:
        return Form(("..., ", Slot(index)), Level.TUPLE)
    if dim < 0:
        return Form(("..., ", Slot(index), ", :" * (-dim - 1)), Level.TUPLE)
    return Form((":, " * dim, Slot(index)), Level.TUPLE)


def _index(arguments: Arguments) -> Form:
    indices, given = arguments.raw["indices"], arguments["indices"]
    assert isinstance(indices, tuple)
    assert isinstance(given, Form)
    slots = [part for part in given.parts if isinstance(part, Slot)]
    parts: list[str | Slot] = []
    for number, (index, slot) in enumerate(zip(indices, slots, strict=True)):
        parts += [", " if number else "", ":" if index is None else slot]
    return indexed(arguments["self"], Form(tuple(parts), Level.TUPLE))


def _repeat_interleave(arguments: Arguments) -> Form:
    arguments.raw["output_size"] = None  # says nothing new, and a rank may have a part only
    return by_schema(arguments, "repeat_interleave")


SPECIAL: Mapping[str, Callable[[Arguments], Form]] = MappingProxyType(
    {
        "dropout": _dropout,
        "scaled_dot_product_attention": _attention,
        "batch_norm": _batch_norm,
        "flatten": _flatten,
        "pad": _pad,
        "rsub": _subtract_from,
        "pow": _power,
        "aten.to.dtype": _convert,
        "numpy_T": _transposed,
        "mT": _transposed,
        "tensordot": _tensordot,
        "aten.repeat_interleave.self_int": _repeat_interleave,
        "aten.select.int": _select,
        "aten.slice.Tensor": _slice,
        "aten.index.Tensor": _index,
    }
)
