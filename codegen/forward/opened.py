"""Prints results, losses and metrics; defines the dataclasses that describe printed source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.reading.forward_source import (
    LOSS,
    ROOT,
    is_mapping,
    is_plain,
    items_of,
    leaves,
    pairs,
)
from autopar.codegen.forward.reading.modules import Imported
from autopar.codegen.forward.scope import PrintAgainError
from autopar.codegen.forward.writing import written
from autopar.codegen.text.expressions import (
    Expression,
    LocalTensor,
    Slot,
    SourceForm,
    bare,
    call,
    literal,
    mapped,
    sequence,
    string,
    text,
)
from autopar.codegen.text.lines import Line, Pattern, wrapped_definition
from autopar.planner.graph.graph import batch_key
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import Extent, Listed, Mapped, NamedFields, Ref, Value, objects, refs


def returned(builder: BodyBuilder, value: Value) -> Expression:
    """Return the expression after `return` in a printed forward: a tuple there has no brackets."""
    if is_mapping(value):
        raise PrintAgainError(builder.scope, reason="its result is no plain tuple")
    if isinstance(value, tuple) and not isinstance(value, Listed) and len(value) > 1:
        return bare([_result(builder, item) for item in value])
    return _result(builder, value)


def _result(builder: BodyBuilder, value: Value) -> Expression:
    if isinstance(value, Ref):
        return _tensor(builder, value.tensor)
    if isinstance(value, tuple):
        return sequence(value, tuple(_result(builder, item) for item in value))
    if value is None or isinstance(value, (bool, int, float, complex)):
        return literal(value)
    raise PrintAgainError(builder.scope, reason=f"it returns {value}")


def _tensor(builder: BodyBuilder, tensor: str) -> Expression:
    if tensor not in builder.graph.tensors:
        return literal(None)  # the loss does not depend on it
    left = builder.opening.leaves.get(tensor)
    layout = builder.have.get(tensor, builder.split.made(tensor))
    need = left[1] if left is not None and left[0] == builder.scope else layout
    return builder.value(tensor, WHOLE if tensor == builder.graph.loss else need)


def store_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Add a line that stores the outputs for evaluations; return the parts that are not computed.

    The outputs are stored because a forward that includes the loss returns only the loss.
    """
    before = len(builder.lines)
    shown = whole_outputs(builder, value)
    builder.lines.append(
        Line(results=None, expression=SourceForm(("self.for_metrics = ", Slot(shown))))
    )
    builder.only_in_evaluations(before)
    return absent_outputs(builder, value)


def absent_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Return the parts of the outputs that are not computed, such as `outputs.preds`."""
    found = leaves(value, "outputs")
    return tuple(_named(place) for place, part in found if _is_absent(builder, part))


def _named(place: str) -> str:
    return place.replace('"', "'")  # printed in double quotes


def _is_absent(builder: BodyBuilder, part: Value) -> bool:
    """Whether a part of the outputs is missing: the loss does not need it, or it is an object."""
    if isinstance(part, Ref):
        return part.tensor not in builder.have
    return any(objects(part)) or not isinstance(part, (str, bool, int, float, complex, NoneType))


def whole_outputs(builder: BodyBuilder, value: Value, place: str = "outputs") -> Expression:
    """Return the model's outputs with whole tensors; `place` is their name in metrics()."""
    inner = [whole_outputs(builder, one, where) for where, one in items_of(value, place)]
    if is_mapping(value):
        keys = [key for key, _ in pairs(value)]
        if isinstance(value, NamedFields):
            return call("named_outputs", keywords=tuple(zip(keys, inner, strict=True)))
        made = mapped(zip(map(text, map(string, keys)), inner, strict=True))
        return made if isinstance(value, Mapped) else call("Outputs", made)
    if isinstance(value, tuple):
        return sequence(value, tuple(inner))
    if _is_absent(builder, value):
        return call("Absent", text(string(_named(place))))
    if isinstance(value, Ref):
        return builder.value(value.tensor, WHOLE)
    assert isinstance(value, (str, bool, int, float, complex, NoneType))
    return literal(value)


_ARGUMENTS = ("outputs: Tensor", "batch: Mapping[str, Tensor]", "tensor: Axis")


def printed_loss(opening: Opening) -> str:
    """Return the source of `split_loss(outputs, batch, tensor)`."""
    builder = _builder_with_outputs(opening)
    bind_batch(builder)
    for op in opening.tree.ops[LOSS]:
        if opening.tree.is_of_loss(op):
            builder.add(op)
    loss = builder.value(opening.split.graph.loss, WHOLE)
    return _function_of_outputs("split_loss", builder, loss, returns="Tensor", what="loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedMetrics:
    """The source of `whole_metrics(outputs, batch, tensor)`, and the outputs that it lacks."""

    source: str
    absent: tuple[str, ...]


def printed_metrics(opening: Opening) -> PrintedMetrics | None:
    """Return the function for metrics, or None if each rank has every output whole."""
    builder = _builder_with_outputs(opening)
    result = opening.split.graph.calls[ROOT].result
    absent = absent_outputs(builder, result) if ROOT in opening.opened else ()
    is_whole = all(
        one.kind in (LayoutKind.WHOLE, LayoutKind.REPLICATED) for one in builder.have.values()
    )
    if is_whole and not absent:
        return None
    metrics = call("compute_metrics", whole_outputs(builder, result), text("batch"))
    source = _function_of_outputs(
        "whole_metrics", builder, metrics, returns="Mapping[str, Tensor]", what="metrics"
    )
    return PrintedMetrics(source=source, absent=absent)


def _builder_with_outputs(opening: Opening) -> BodyBuilder:
    """Return a builder for a function that takes the model's outputs."""
    builder = BodyBuilder(opening, LOSS, axis="tensor")
    result = opening.split.graph.calls[ROOT].result
    _bind_outputs(builder, result, "outputs")
    return builder


def _bind_outputs(builder: BodyBuilder, value: Value, place: str) -> None:
    """Make the tensors of the outputs available under their expressions: `outputs.logits`."""
    if isinstance(value, Ref):
        if value.tensor in builder.graph.tensors:
            builder.bind(
                LocalTensor(value.tensor, builder.opening.arrives(value.tensor, LOSS)), place
            )
    elif is_plain(value) and any(refs(value)):
        builder.bind_pattern(_pattern(builder.opening, value), place)
    else:
        for inner, one in items_of(value, place):
            _bind_outputs(builder, one, inner)


def _function_of_outputs(
    name: str, builder: BodyBuilder, result: Expression, *, returns: str, what: str
) -> str:
    head = wrapped_definition(name, [*_ARGUMENTS], returns, indent=0)
    does = f"Return the {what} of outputs that are split over the tensor axis."
    return function_source(head, does, written(builder.body(result), builder.owner, indent=4))


def function_source(head: Sequence[str], does: str, lines: Iterable[str]) -> str:
    """Return the source of a function at the top of a script."""
    return "\n".join([*head, f'    """{does}"""', *lines]) + "\n"


def bind_batch(builder: BodyBuilder) -> None:
    """Make the batch's tensors available as `batch["key"]`."""
    for name in builder.graph.inputs:
        builder.bind(
            LocalTensor(name, builder.split.made(name)), f"batch[{string(batch_key(name))}]"
        )


def _pattern(opening: Opening, value: Value) -> Pattern:
    if isinstance(value, Ref) and value.tensor in opening.split.graph.tensors:
        return LocalTensor(value.tensor, opening.arrives(value.tensor, LOSS))
    if isinstance(value, tuple) and any(refs(value)):
        return tuple(_pattern(opening, item) for item in value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedClass:
    """A subclass of one of the model's classes, and the modules that get it as their class.

    `source` names the parent class as in `base`. With `uses_axis` the class has an attribute
    `tensor`, the tensor axis of the mesh, which the script sets.
    """

    name: str
    base: Imported
    instances: tuple[str, ...]
    source: str
    uses_axis: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingTensor:
    """A tensor sent between stages, with its whole shape before any split."""

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    layout: Layout
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClass:
    """The root's subclass for one pipeline stage, or for the whole model without a pipeline.

    The forward takes `takes` by position and the batch by keyword, and returns `gives`. The last
    stage's forward returns the model's outputs, or with `returns_loss` the loss; then it stores the
    outputs for metrics, except those in `absent`. `modules` are the modules that the stage uses;
    the script drops the others. Similar stages share one class, and differ in the attributes
    `bounds`, which the script sets. If the shapes that the stage sends vary with the lengths of
    rows, `crossing` is the source of a function that returns them.
    """

    cls: OpenedClass
    takes: tuple[CrossingTensor, ...]
    gives: tuple[CrossingTensor, ...]
    returns_loss: bool
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    bounds: tuple[tuple[str, int], ...] = ()
    crossing: str = ""
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """The code that a script defines beside the user's.

    `stages` is empty if the model's own forward stays. `loss` is the source of `split_loss(outputs,
    batch, tensor)`, or None if the user's own loss is correct. `metrics` is the source of
    `whole_metrics(outputs, batch, tensor)`, if ranks have shards of outputs; `absent` are outputs
    that the code does not compute, so no metric can use them. `valid_targets` is the source of a
    function that counts the targets which the loss averages over, or None if every row has the same
    weight. With `weighs_terms` the loss has several means, each multiplied by its own weight.
    `divisor` is the source of a function that maps a count to the loss's divisor, for example to
    max(count, 1). The code of `inlined` calls is in their callers' code. `functions` of the model's
    files are called by the printed code. `own_rows` are keys of the batch of which a tensor rank
    gets only its own rows. `splits_rows` is true if tensor ranks split rows anywhere.
    """

    classes: tuple[OpenedClass, ...]
    stages: tuple[StageClass, ...]
    loss: str | None
    metrics: str | None
    valid_targets: str | None
    weighs_terms: bool
    divisor: str | None
    inlined: frozenset[str]
    functions: tuple[Imported, ...] = ()
    own_rows: tuple[str, ...] = ()
    splits_rows: bool = False
    absent: tuple[str, ...] = ()

    @property
    def imported(self) -> tuple[Imported, ...]:
        """The classes and functions that the script imports to extend or call them."""
        classes = (*self.classes, *(stage.cls for stage in self.stages))
        bases = (cls.base for cls in classes if not cls.base.name.startswith("nn."))
        return (*dict.fromkeys(bases), *self.functions)

    @property
    def is_printed(self) -> bool:
        """Whether the script contains code of the model."""
        return bool(self.classes or self.stages or self.loss)
