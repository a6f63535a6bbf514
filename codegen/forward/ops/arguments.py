"""Prints the arguments of an op, and conversions between layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.codegen.forward.ops import table
from autopar.codegen.forward.ops.sizes import ReadableSizes
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.text.expressions import (
    Expression,
    LocalTensor,
    Slot,
    SourceForm,
    attribute,
    call,
    joined,
    literal,
    method,
    text,
)
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import CONVERSIONS, Layout, LayoutKind
from autopar.planner.graph.ops import MODEL_EXTREMES, DType, Extent, Op, Ref, Value


def convert(
    value: Expression, wanted: LocalTensor, local: LocalTensor, sizes: ReadableSizes
) -> SourceForm:
    """Return a value converted from its layout to the wanted one."""
    produced, needed = local.layout, wanted.layout
    conversion = CONVERSIONS.get((produced.kind, needed.kind))
    if conversion is None:
        raise InputError(
            f"{local.tensor} is made in layout {produced} and needed in {needed}",
            expected="a pair of layouts with a conversion between them",
            fix="plan again: this plan is not sound",
        )
    if produced.kind is LayoutKind.SPLIT and needed.kind is LayoutKind.SPLIT:
        return _exchange(value, wanted, local, sizes, conversion.function)
    layout = produced if produced.kind is LayoutKind.SPLIT else needed
    if layout.kind is not LayoutKind.SPLIT:
        return call(conversion.function, value, sizes.axis)
    dim = text(str(layout.dim))
    cut = sizes.split.axes.dims[local.tensor][layout.dim], layout.axis
    if sizes.may_omit_parts(*cut, is_whole=needed.kind is LayoutKind.SPLIT):
        return call(conversion.function, value, dim, sizes.axis)
    keywords = (("parts", sizes.listed(*cut)),)
    return call(conversion.function, value, dim, sizes.axis, keywords=keywords)


def convert_own(own: Expression, tensor: str, need: Layout, sizes: ReadableSizes) -> Expression:
    """Return a parameter or buffer in the needed layout."""
    made = sizes.split.made(tensor)
    if made == need:
        return own
    known = sizes.split.graph.tensors[tensor]
    if not known.requires_grad and {made.kind, need.kind} == {
        LayoutKind.WHOLE,
        LayoutKind.REPLICATED,
    }:
        return own
    return convert(own, LocalTensor(tensor, need), LocalTensor(tensor, made), sizes)


def _exchange(
    value: Expression, wanted: LocalTensor, local: LocalTensor, sizes: ReadableSizes, name: str
) -> SourceForm:
    gathered, cut = local.layout, wanted.layout
    keywords: list[tuple[str, Expression]] = []
    for key, layout in (("gather_parts", gathered), ("split_parts", cut)):
        parts = sizes.split.axes.dims[local.tensor][layout.dim], layout.axis
        if not sizes.may_omit_parts(*parts, is_whole=key == "split_parts"):
            keywords.append((key, sizes.listed(*parts)))
    dims = text(str(gathered.dim)), text(str(cut.dim))
    return call(name, value, *dims, sizes.axis, keywords=tuple(keywords))


def _used_along(users: Sequence[Op], split: SplitGraph) -> str:
    """Return the split axis of the first split op that uses a value, directly or indirectly."""
    waiting, seen = list(users), set[str]()
    while waiting:
        op = waiting.pop(0)
        if name := split.split_axis_name(op):
            return name
        layout = split.ops.get(op.name)
        gives = layout.gives if layout is not None and op.name not in seen else ()
        seen.add(op.name)
        if any(one.kind is LayoutKind.REPLICATED for one in gives):
            waiting += [user for made in op.outputs for user in split.graph.index.readers[made]]
    return ""


def reason(local: LocalTensor, wanted: LocalTensor, users: Sequence[Op], split: SplitGraph) -> str:
    """Return the comment on a conversion, with names of the model's axes."""
    maker = split.graph.index.made_by.get(local.tensor)
    made_along = split.split_axis_name(maker) if maker is not None else ""
    used_along = _used_along(users, split)
    source, target = split.axis_name(local.layout), split.axis_name(wanted.layout)
    sums = f"partial sums over {made_along}" if made_along else "partial sums"
    use = f"the next ops are split along {used_along}" if used_along else "every rank uses it"
    match local.layout.kind, wanted.layout.kind:
        case LayoutKind.PARTIAL, LayoutKind.SPLIT:
            return f"{sums}, added up into shards of {target}"
        case LayoutKind.PARTIAL, _:
            return f"{sums}, added up"
        case LayoutKind.SPLIT, LayoutKind.SPLIT if source == target:
            dims = local.layout.dim, wanted.layout.dim
            return f"from shards of {source} along dim {dims[0]} to those along dim {dims[1]}"
        case LayoutKind.SPLIT, LayoutKind.SPLIT:
            return f"from shards of {source} to shards of {target}"
        case LayoutKind.SPLIT, LayoutKind.PARTIAL:
            return f"shards of {source} padded with zeros, to be added up later"
        case LayoutKind.SPLIT, _:
            return f"gathers all of {source}; {use}"
        case _, LayoutKind.SPLIT:
            return f"each rank takes its shard of {target}"
        case LayoutKind.WHOLE, LayoutKind.REPLICATED:
            return f"{use}; the backward adds up the ranks' gradients"
        case _, LayoutKind.PARTIAL:
            return "one rank keeps it, the others take zeros: the sum counts it once"
        case _:
            return "all ranks have the same gradient, and only one passes it on"


def explained(why: str, printed: SourceForm) -> str:
    """Return the comment on a line; if the line has an argument `parts`, explain that, too."""
    names = (part for part in printed.parts if isinstance(part, str))
    if not any(name.endswith("parts=") for name in names):
        return why
    return f"{why}; {PARTS}" if why else PARTS


PARTS = "parts: (number of blocks, elements of a block)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedPlace:
    """The context of a printed op: its inputs in order, and expressions for some values."""

    inputs: tuple[Expression, ...]
    training: SourceForm
    dtype: Expression | None  # of a tensor with the model's own floating dtype
    device: Expression | None
    sizes: Mapping[str, Expression]  # size arguments that are printed already
    rate: SourceForm | None = None  # the module's attribute for the dropout rate
    scale: SourceForm | None = None  # the module's attribute for the scale of attention


def whole_number(value: Value) -> int:
    """Return an argument that is an integer by the op's schema."""
    assert isinstance(value, int)
    return value


class Arguments:
    """The arguments of an op, by ATen's names, as expressions."""

    def __init__(self, op: Op, place: PrintedPlace) -> None:
        self.op, self.place = op, place
        self.raw = dict(op.arguments)
        schema = schema_of(op.target)
        name = base_name(op.target)
        function = table.FUNCTIONS.get(name)
        is_known = function is not None and function.fits(self.raw)
        counted = {a.name: a.N for a in schema.arguments if is_known or _function_of(name)}
        # lists that are printed as one number if all items are equal: `stride=2` for (2, 2)
        self.short = {key for key, count in counted.items() if is_known or count is not None}
        # lists whose only item is printed as a number
        self.single = {key for key, count in counted.items() if count == 1}
        inputs = iter(place.inputs)
        self.printed = {
            name: place.sizes[name] if name in place.sizes else self._print(name, value, inputs)
            for name, value in op.arguments
        }
        self.defaults: dict[str, Any] = {
            a.name: a.default_value for a in schema.arguments if a.has_default_value()
        }
        self.keyword_only = {a.name for a in schema.arguments if a.kwarg_only}

    def __getitem__(self, name: str) -> Expression:
        return self.printed[name]

    def is_default(self, name: str) -> bool:
        """Whether an argument may be left out: it has its default value, or changes nothing."""
        raw = self.raw.get(name)
        if name in ("layout", "pin_memory", "non_blocking", "implicit"):
            return True
        if name == "memory_format":
            return raw in (None, 0, 1)
        if name not in self.raw or name not in self.defaults:
            return name not in self.raw
        default = self.defaults[name]
        if isinstance(raw, tuple):
            listed = default if isinstance(default, list) else [default]
            return len({*raw, *listed}) == 1 if raw and listed else len(raw) == len(listed)
        same_type = isinstance(raw, bool) == isinstance(default, bool)
        return same_type and raw == default

    def _print(self, name: str, value: Value, inputs: Iterator[Expression]) -> Expression:
        if isinstance(value, Ref):
            return next(inputs)
        if isinstance(value, tuple):
            return self._tuple(name, value, inputs)
        if isinstance(value, DType):
            return self.dtype(value)
        if isinstance(value, Extent):
            return literal(value.at(0))
        if isinstance(value, float) and abs(value) in MODEL_EXTREMES:
            return self._extreme("min" if value < 0 else "max")
        if name == "device" and value is not None:
            return self.place.device or literal("cpu")
        if name == "memory_format" and isinstance(value, str):
            return text(value)  # torch.channels_last and similar print as themselves
        if name in table.ENUMERATIONS and isinstance(value, int):
            return literal(table.ENUMERATIONS[name][value])
        return literal(value)

    def _tuple(
        self, name: str, value: tuple[Value, ...], inputs: Iterator[Expression]
    ) -> Expression:
        if len(value) == 1 and name in self.single and isinstance(value[0], int):
            return literal(value[0])
        is_same = len(set(value)) == 1 and isinstance(value[0], int) and len(value) > 1
        if is_same and name in self.short & table.WINDOWS:
            return literal(value[0]) if isinstance(value[0], int) else joined(())
        return joined(tuple(self._print("", item, inputs) for item in value))

    def _extreme(self, which: str) -> SourceForm:
        """Print the least or greatest number of the model's dtype; the trace had another dtype."""
        dtype = self.dtype(DType("model"))
        return SourceForm(("torch.finfo(", Slot(dtype), f").{which}"))

    def dtype(self, value: DType) -> Expression:
        """Return the expression of a dtype."""
        if value.name == "model":
            return self.place.dtype or text("torch.get_default_dtype()")
        return text(f"torch.{value.name}")


def base_name(target: str) -> str:
    """Return the name of an op without namespace and overload."""
    return target.split(".")[1]


def schema_of(target: str) -> Any:
    """Return the schema that PyTorch declares for an op."""
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload)._schema


def function_call(arguments: Arguments, function: table.Function) -> SourceForm:
    """Print an op as a call of the function in its row of the table."""
    positional: list[Expression] = []
    for name in function.positional:
        if name.startswith("*"):
            inner = arguments[name[1:]]
            assert isinstance(inner, SourceForm)
            positional += [p.expression for p in inner.parts if isinstance(p, Slot)]
        else:
            positional.append(arguments[name])
    absent = [arguments.raw.get(name, 0) is None for name in function.positional]
    while len(absent) > function.required and absent.pop():
        positional.pop()
    keywords = [
        (keyword, arguments[name])
        for keyword, name in function.keywords
        if name in arguments.raw and not arguments.is_default(name)
    ]
    name = base_name(arguments.op.target)
    if name in table.MODES:
        keywords.append(("mode", literal(table.MODES[name])))
    keywords += [(keyword, literal(value)) for keyword, value in table.ALWAYS.get(name, ())]
    return call(function.name, *positional, keywords=tuple(keywords))


def _function_of(name: str) -> str:
    """Return the torch function of an op's name, or ""."""
    if name in table.AS_OPS:
        return ""
    holder, _, rest = name.partition("_")
    if holder in ("fft", "linalg", "special") and hasattr(getattr(torch, holder), rest):
        return f"torch.{holder}.{rest}"
    if hasattr(torch, name):
        return f"torch.{name}"
    return f"F.{name}" if hasattr(functional, name) else ""


def as_op(arguments: Arguments) -> SourceForm:
    """Print an op by its full name in torch.ops."""
    given = tuple((key, arguments[key]) for key in arguments.raw)
    return call(f"torch.ops.{arguments.op.target}", keywords=given)


def loss_call(arguments: Arguments, name: str) -> SourceForm:
    """Print a loss as a function: tensors by position, numbers except defaults by keyword."""
    is_given = {key: key not in arguments.defaults for key in arguments.raw}
    are_plain = {k for k, v in arguments.raw.items() if not isinstance(v, (Ref, tuple))}
    positional = [arguments[key] for key in arguments.raw if is_given[key] and key not in are_plain]
    keywords = tuple(
        (key, arguments[key])
        for key in arguments.raw
        if (key in are_plain or not is_given[key]) and not arguments.is_default(key)
    )
    return call(f"F.{name}", *positional, keywords=keywords)


def by_schema(arguments: Arguments, name: str) -> SourceForm:
    """Print an op as a method of its first argument, or else as a function of torch."""
    if "reduction" in arguments.raw and hasattr(functional, name):
        return loss_call(arguments, name)
    names = [key for key in arguments.raw if key not in ("self", "input")]
    owner = next((key for key in ("self", "input") if key in arguments.raw), None)
    positional: list[Expression] = []
    keywords: list[tuple[str, Expression]] = []
    for key in names:
        if key != "device" and arguments.is_default(key):
            continue
        if key == "device" and arguments.raw[key] is None:
            continue
        is_dim = key in ("dim", "keepdim") and name not in table.PLAIN_DIM
        skipped = len(positional) < names.index(key)
        if is_dim or skipped or keywords or key in arguments.keyword_only:
            keywords.append((key, arguments[key]))
        else:
            positional.append(arguments[key])
    if name in table.SPREAD and positional and isinstance(positional[0], SourceForm):
        spread = [part.expression for part in positional[0].parts if isinstance(part, Slot)]
        positional = [*(spread or positional[:1]), *positional[1:]]
    if owner is not None and hasattr(Tensor, name) and isinstance(arguments.raw[owner], Ref):
        if not callable(getattr(Tensor, name)):
            return attribute(arguments[owner], name)  # x.real
        return method(arguments[owner], name, *positional, keywords=tuple(keywords))
    function = _function_of(name)
    if not function or owner not in (None, next(iter(arguments.raw))):
        return as_op(arguments)
    if owner is not None:
        positional.insert(0, arguments[owner])
    return call(function, *positional, keywords=tuple(keywords))
