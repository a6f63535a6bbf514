"""Prints the classes that a plan changes, and the function that describes what a stage sends."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opened import CrossingTensor, bind_batch, function_source, returned
from autopar.codegen.forward.opening import Opening, splits_rows
from autopar.codegen.forward.reading.forward_source import LOSS, as_tuple, is_mapping, pairs
from autopar.codegen.forward.reading.modules import Imported, Module, Modules, bound
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.forward.scope import PrintAgainError
from autopar.codegen.forward.writing import written
from autopar.codegen.text.expressions import (
    Expression,
    LocalTensor,
    call,
    comment,
    identifier,
    joined,
    literal,
    string,
    text,
)
from autopar.codegen.text.lines import (
    Body,
    Pattern,
    wrapped_definition,
)
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.layouts import LayoutKind
from autopar.planner.graph.ops import BATCH, MODEL_DTYPE, Mapped, ModuleCall, Ref, Value, refs
from autopar.planner.programs.layouts.opened import is_split

CROSSING = "crossing"
_UNPACKED = re.compile(r"\s+((?:\w+, )+\w+) = .*\.shape")


def printed_crossing(opening: Opening, gives: Sequence[CrossingTensor]) -> str:
    """Return the source of `crossing(batch)`, or "" if the sent shapes are always the same."""
    split = opening.split
    others = [split.lengths.shape(one.name) for one in gives]
    if all(one.shape == other for one, other in zip(gives, others, strict=True)):
        return ""
    builder = BodyBuilder(opening, LOSS)
    bind_batch(builder)
    shown = [_crossing(one, builder) for one in gives]
    result = joined(tuple(shown))
    has_splits = any(one.layout.kind is LayoutKind.SPLIT for one in gives)
    how = ", and how tensor ranks split them" if has_splits else ""
    does = f"Return the shapes that a stage sends for a microbatch{how}."
    head = f"def {CROSSING}(batch: Mapping[str, Tensor]) -> tuple[Crossing, ...]:"
    lines = map(_with_cut_shape, written(builder.body(result), builder.owner, indent=4))
    return function_source([head], does, lines)


def _with_cut_shape(line: str) -> str:
    """Append `[:n]` to a shape that is unpacked to n names.

    The runtime also calls crossing() with a stand-in for the batch, whose shapes have more dims.
    """
    found = _UNPACKED.fullmatch(line)
    return line if found is None else f"{line}[:{found[1].count(',') + 1}]"


def _crossing(one: CrossingTensor, builder: BodyBuilder) -> Expression:
    split = builder.split
    others = split.lengths.shape(one.name)
    rows = text("MICROBATCH" if splits_rows(split) else "ROWS")
    shape = [
        rows if size == other == BATCH else builder.sizes.whole(size, other)
        for size, other in zip(one.shape, others, strict=True)
    ]
    given: list[Expression] = [joined(tuple(shape))]
    layout = one.layout
    if layout.kind is LayoutKind.SPLIT:
        dim = split.axes.dims[one.name][layout.dim], layout.axis
        parts = [] if builder.sizes.are_single(*dim) else [builder.sizes.listed(*dim)]
        given.append(call("Split", literal(layout.dim), *parts))
    keywords: list[tuple[str, Expression]] = []
    if one.dtype != MODEL_DTYPE:
        keywords.append(("dtype", text(f"torch.{identifier(one.dtype)}")))
    if not one.has_gradient:
        keywords.append(("has_gradient", literal(value=False)))
    return call("Crossing", *given, keywords=tuple(keywords))


_Parameter = inspect.Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedForward:
    """The forward of an opened call: its source, and whether it uses the tensor axis."""

    lines: tuple[str, ...]
    uses_axis: bool


def printed_forward(opening: Opening, call: str) -> PrintedForward:
    """Return the printed forward of an opened call, with the signature of the original."""
    record = opening.split.graph.calls[call]
    module = _annotated(opening.split.modules[record.path], opening.split)
    builder = BodyBuilder(opening, call)
    for name, value in bound(module, record.arguments, record.keywords):
        _bind(builder, name, value)
    for op in opening.tree.ops.get(call, ()):
        builder.add(op)
    body = builder.body(returned(builder, record.result))
    return forward(module, body, builder, _signature(module), docstring=_does(module))


def forward(
    module: Module,
    body: Body,
    builder: BodyBuilder,
    signature: Sequence[str],
    *,
    docstring: str,
    slice_text: str | None = None,
) -> PrintedForward:
    """Return the lines of a forward, indented as a method."""
    lines = written(body, builder.owner, indent=8, slice_text=slice_text)
    head = wrapped_definition("forward", ["self", *signature], module.returns, indent=4)
    return PrintedForward(
        lines=(*head, f'        """{docstring}"""', *lines),
        uses_axis="self.tensor" in "\n".join(lines),
    )


def _annotated(module: Module, split: SplitGraph) -> Module:
    """Annotate unannotated arguments as Tensor where every call of the class passes a tensor."""
    modules, calls = split.modules, _calls_of(split.graph, split.modules)[module.home]
    given = [dict(bound(modules[c.path], c.arguments, c.keywords)) for c in calls]
    arguments = tuple(
        replace(argument, annotation="Tensor")
        if argument.annotation == "Any"
        and all(isinstance(values.get(argument.name), Ref) for values in given)
        else argument
        for argument in module.arguments
    )
    gives = module.returns == "Any" and all(isinstance(c.result, Ref) for c in calls)
    return replace(module, arguments=arguments, returns="Tensor" if gives else module.returns)


@once_per_graph
def _calls_of(graph: Graph, modules: Modules) -> Mapping[Imported, Sequence[ModuleCall]]:
    """Return the calls of each class's modules."""
    found: dict[Imported, list[ModuleCall]] = defaultdict(list)
    for one in graph.calls.values():
        if one.path in modules:
            found[modules[one.path].home].append(one)
    return found


def _does(module: Module) -> str:
    return f"Do what {module.class_name} does, on this rank's share."


def _signature(module: Module) -> list[str]:
    """Return the parameters of a forward as they are declared, including `/` and `*`."""
    declared: list[str] = []
    kinds = [argument.kind for argument in module.arguments]
    for position, argument in enumerate(module.arguments):
        before = kinds[:position]
        if argument.kind is _Parameter.KEYWORD_ONLY and not (
            _Parameter.KEYWORD_ONLY in before or _Parameter.VAR_POSITIONAL in before
        ):
            declared.append("*")
        declared.append(argument.text)
        if argument.kind is _Parameter.POSITIONAL_ONLY and (
            position + 1 == len(kinds) or kinds[position + 1] is not _Parameter.POSITIONAL_ONLY
        ):
            declared.append("/")
    return declared


def _bind(builder: BodyBuilder, name: str, value: Value) -> None:
    if isinstance(value, Ref):
        tensor = value.tensor
        if tensor not in builder.graph.tensors:
            return  # the loss does not depend on it
        builder.bind(LocalTensor(tensor, builder.opening.entry(builder.scope, tensor)), name)
    elif isinstance(value, Mapped):
        for key, item in pairs(value):
            _bind(builder, f"{name}[{string(key)}]", item)
    elif isinstance(value, tuple) and any(refs(value)):
        path = builder.graph.calls[builder.scope].path
        names = builder.split.modules[path].unpacks.get(name, ())
        builder.bind_pattern(_pattern(builder, value, name), name, names)


def _pattern(builder: BodyBuilder, value: Value, name: str) -> Pattern:
    value = as_tuple(value)
    if isinstance(value, Ref):
        layout = builder.opening.entry(builder.scope, value.tensor)
        return LocalTensor(value.tensor, layout)
    if is_mapping(value) and any(refs(value)):
        raise PrintAgainError(builder.scope, reason=f"{name} has a mapping")
    if isinstance(value, tuple):
        return tuple(_pattern(builder, item, name) for item in value)
    return None


def class_source(
    name: str, base: str, docstring: str, printed: PrintedForward, *, fields: Sequence[str] = ()
) -> str:
    """Return the source of a class; `fields` are annotations of attributes that the script sets."""
    lines = [f"class {name}({base}):", f'    """{docstring}"""', ""]
    declared = [*(["tensor: Axis"] if printed.uses_axis else []), *fields]
    if declared:
        lines += [*(f"    {field}" for field in declared), ""]
    return "\n".join([*lines, *printed.lines]) + "\n"


def own_name(base: str, opening: Opening) -> str:
    """Return the name of the class that a script makes of one of the model's classes."""
    prefix = "TensorParallel" if opening.split.degree > 1 else "Opened"
    return f"{prefix}{base.removeprefix('nn.')}"


def base_name(module: Module) -> str:
    """Return the name of a module's class in the script; raise if it cannot be imported."""
    if "<locals>" in module.home.qualname:
        raise InputError(
            f"the class of {module.path or 'the model'} is defined inside a function, "
            "and the plan needs a subclass of it",
            where=f"{module.home.module}.{module.home.qualname}",
            fix="define the class at the top of its file",
        )
    return module.home.name


def described(opening: Opening, path: str) -> str:
    """Return a docstring line: the class, and the axes that are split in it."""
    split, names, summed = opening.split, dict[str, None](), dict[str, None]()
    for key, record in split.graph.calls.items():
        if record.path == path:
            for op in opening.tree.ops.get(key, ()):
                summed[comment(split.split_axis_name(op))] = None  # its split axis
                for layout in (split.made(tensor) for tensor in op.outputs):
                    if is_split(layout):
                        names[comment(split.axis_name(layout))] = None
    base = split.modules[path].class_name
    listed = [name for name in names or summed if name and not name[0].isdigit()]
    if not listed:
        return f"{base} with a forward that the plan changes."
    if len(listed) > 4:
        listed = [*listed[:3], "more"]
    words = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    return f"{base} with {words} split over the tensor axis."
