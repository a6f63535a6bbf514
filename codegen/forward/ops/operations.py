"""Turns one op of the graph into the expression that a person would write for it."""

from __future__ import annotations

from autopar.codegen.forward.ops import table
from autopar.codegen.forward.ops.arguments import (
    Arguments,
    Place,
    as_op,
    base_name,
    by_schema,
    function_call,
    schema_of,
)
from autopar.codegen.forward.ops.own_ways import SPECIAL
from autopar.codegen.forward.text.expressions import Form, Level, Slot, binary
from autopar.planner.ops import Op


def printed(op: Op, place: Place) -> Form:
    """Return an op as an expression."""
    arguments = Arguments(op, place)
    name = base_name(op.target)
    if not op.target.startswith("aten."):
        return as_op(arguments)  # whatever PyTorch has under its name
    special = SPECIAL.get(op.target) or SPECIAL.get(name)
    if special is not None:
        return special(arguments)
    if name in table.BINARY and arguments.raw.get("alpha", 1) == 1:
        operator, level = table.BINARY[name]
        if "rounding_mode" not in arguments.raw:
            return binary(arguments["self"], operator, arguments["other"], level)
    if name in table.UNARY:
        return Form((table.UNARY[name], Slot(arguments["self"], Level.SIGN)), Level.SIGN)
    function = table.FUNCTIONS.get(name)
    if function is not None and function.fits(arguments.raw):
        return function_call(arguments, function)
    return by_schema(arguments, table.WRITING.get(name, name))


def gives_many(op: Op) -> bool:
    """Whether PyTorch's function returns several tensors, or a list of them."""
    if base_name(op.target) == "embedding_bag":
        return False
    returns = schema_of(op.target).returns
    return len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)


__all__ = ["Place", "base_name", "gives_many", "printed"]
