"""Prints ops: by their table row, or by a special function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.codegen.forward.ops import table
from autopar.codegen.forward.ops.arguments import (
    Arguments,
    PrintedPlace,
    as_op,
    base_name,
    by_schema,
    function_call,
    schema_of,
)
from autopar.codegen.forward.reading.author_names import is_index
from autopar.codegen.text.expressions import (
    Binding,
    Expression,
    Slot,
    SourceForm,
    at_dim,
    attribute,
    binary,
    call,
    indexed,
    joined,
    literal,
    method,
    power,
    text,
)
from autopar.planner.graph.ops import DType, Op, Value

_SMALL = 1e6  # a float below it is printed as an integer if it has no fraction


def _dropout(arguments: Arguments) -> SourceForm:
    rate = arguments.place.rate or arguments["p"]
    training = arguments.place.training if arguments.raw["train"] else literal(value=False)
    return call("F.dropout", arguments["input"], rate, training)


def _attention(arguments: Arguments) -> SourceForm:
    if arguments.place.scale is not None:
        arguments.printed["scale"] = arguments.place.scale
    if arguments.raw["dropout_p"] != 0.0:
        rate = arguments.place.rate or arguments["dropout_p"]
        while_training = (Slot(rate), " if ", Slot(arguments.place.training), " else 0.0")
        arguments.printed["dropout_p"] = SourceForm(while_training, Binding.CHOICE)
    return function_call(arguments, table.FUNCTIONS["scaled_dot_product_attention"])


def _batch_norm(arguments: Arguments) -> SourceForm:
    if arguments.raw["training"]:
        arguments.printed["training"] = arguments.place.training
    return function_call(arguments, table.FUNCTIONS["batch_norm"])


def _subtract_from(arguments: Arguments) -> SourceForm:
    if arguments.raw.get("alpha", 1) != 1:
        return by_schema(arguments, "rsub")
    return binary(arguments["other"], "-", arguments["self"], Binding.SUM)


def _flatten(arguments: Arguments) -> SourceForm:
    if arguments.raw["end_dim"] == -1:
        return by_schema(arguments, "flatten")
    return method(arguments["self"], "flatten", arguments["start_dim"], arguments["end_dim"])


def _pad(arguments: Arguments) -> SourceForm:
    if arguments.raw["value"] == 0:
        arguments.raw["value"] = None  # None is the default, and means 0
    value = arguments.raw["value"]
    if isinstance(value, float) and value.is_integer() and abs(value) < _SMALL:
        arguments.printed["value"] = literal(int(value))  # torch passes it on as a float
    return function_call(arguments, table.FUNCTIONS["pad"])


def _power(arguments: Arguments) -> SourceForm:
    return power(arguments["self"], arguments["exponent"])


def _convert(arguments: Arguments) -> SourceForm:
    dtype = arguments.raw["dtype"]
    assert isinstance(dtype, DType)
    shorthand = table.DTYPE_METHODS.get(dtype.name)
    if shorthand is not None and arguments.is_default("copy"):
        return method(arguments["self"], shorthand)
    keywords = () if arguments.is_default("copy") else (("copy", arguments["copy"]),)
    return method(arguments["self"], "to", arguments["dtype"], keywords=keywords)


def _transposed(arguments: Arguments) -> SourceForm:
    return attribute(arguments["self"], "mT" if arguments.op.target == "aten.mT.default" else "T")


def _tensordot(arguments: Arguments) -> SourceForm:
    dims = joined((arguments["dims_self"], arguments["dims_other"]))
    return call(
        "torch.tensordot", arguments["self"], arguments["other"], keywords=(("dims", dims),)
    )


def _select(arguments: Arguments) -> SourceForm:
    dim = arguments.raw["dim"]
    assert isinstance(dim, int)
    return indexed(arguments["self"], at_dim(dim, arguments["index"]))


def _slice(arguments: Arguments) -> SourceForm:
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
    return indexed(arguments["self"], at_dim(dim, SourceForm(tuple(bounds))))


def _unsqueeze(arguments: Arguments) -> SourceForm:
    """Print a new dim as the source has it: `x[:, None]`, or `x.unsqueeze(1)`."""
    dim, spans = arguments.raw["dim"], arguments.op.spans
    if isinstance(dim, int) and dim >= 0 and spans and is_index(spans[0]):
        return indexed(arguments["self"], at_dim(dim, text("None")))
    return by_schema(arguments, "unsqueeze")


def _index(arguments: Arguments) -> SourceForm:
    indices, given = arguments.raw["indices"], arguments["indices"]
    assert isinstance(indices, tuple)
    assert isinstance(given, SourceForm)
    slots = [part for part in given.parts if isinstance(part, Slot)]
    parts: list[str | Slot] = []
    for number, (index, slot) in enumerate(zip(indices, slots, strict=True)):
        parts += [", " if number else "", ":" if index is None else slot]
    return indexed(arguments["self"], SourceForm(tuple(parts), Binding.TUPLE))


def _repeat_interleave(arguments: Arguments) -> SourceForm:
    arguments.raw["output_size"] = None  # redundant, and wrong on a rank that has a part of the dim
    return by_schema(arguments, "repeat_interleave")


SPECIAL: Mapping[str, Callable[[Arguments], SourceForm]] = MappingProxyType(
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
        "unsqueeze": _unsqueeze,
        "aten.index.Tensor": _index,
    }
)


def printed(op: Op, place: PrintedPlace) -> SourceForm:
    """Return an op as an expression."""
    arguments = Arguments(op, place)
    name = base_name(op.target)
    if not op.target.startswith("aten.") or name in table.AS_OPS:
        return as_op(arguments)  # such as a custom op: torch.ops has it under its name
    special = SPECIAL.get(op.target) or SPECIAL.get(name)
    if special is not None:
        return special(arguments)
    if name in table.BINARY and arguments.raw.get("alpha", 1) == 1:
        operator, level = table.BINARY[name]
        if "rounding_mode" not in arguments.raw:
            return binary(arguments["self"], operator, arguments["other"], level)
    if name in table.UNARY:
        return SourceForm((table.UNARY[name], Slot(arguments["self"], Binding.SIGN)), Binding.SIGN)
    function = table.FUNCTIONS.get(name)
    if function is not None and function.fits(arguments.raw):
        return function_call(arguments, function)
    return by_schema(arguments, table.WRITING.get(name, name))


def split_call(
    op: Op, place: PrintedPlace, function: table.Function, added: Mapping[str, Expression]
) -> SourceForm:
    """Return the runtime's call for a split op; `added` are the tensor axis and perhaps parts."""
    arguments = Arguments(op, place)
    # None and False are defaults of the runtime's functions
    given: dict[str, Value] = {
        key: raw for key, raw in arguments.raw.items() if raw is not None and raw is not False
    }
    arguments.raw = given | dict.fromkeys(added, "")
    arguments.printed |= added
    return function_call(arguments, function)


def gives_many(op: Op) -> bool:
    """Whether PyTorch's function returns several tensors, or a list of them."""
    if base_name(op.target) == "embedding_bag":
        return False
    returns = schema_of(op.target).returns
    return len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
