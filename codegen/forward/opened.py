"""What a script has of printed code: what it returns, its split loss, and the source itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import (
    LOSS,
    ROOT,
    held,
    is_mapping,
    is_plain,
    leaves,
    pairs,
)
from autopar.codegen.forward.reading.modules import Imported
from autopar.codegen.forward.scope import NeedsInlineError
from autopar.codegen.forward.text.expressions import (
    Expression,
    LocalTensor,
    Slot,
    SourceForm,
    call,
    literal,
    mapped,
    sequence,
    string,
    text,
)
from autopar.codegen.forward.text.lines import Body, Line, Pattern, tuple_of, wrapped_definition
from autopar.codegen.forward.writing.writer import Style, written
from autopar.planner.graph.graph import batch_key
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import Extent, Listed, Mapped, NamedFields, Ref, Value, refs


def returned(builder: BodyBuilder, value: Value) -> Expression:
    """Return the result of a call; a tuple stands in a return without brackets."""
    if is_mapping(value):
        record = builder.graph.calls[builder.scope]
        raise NeedsInlineError(builder.scope, record, reason="its result is no plain tuple")
    if isinstance(value, tuple) and not isinstance(value, Listed) and len(value) > 1:
        return tuple_of([_result(builder, item) for item in value])
    return _result(builder, value)


def _result(builder: BodyBuilder, value: Value) -> Expression:
    if isinstance(value, Ref):
        return _tensor(builder, value.tensor)
    if isinstance(value, tuple):
        return sequence(value, tuple(_result(builder, item) for item in value))
    if value is None or isinstance(value, (bool, int, float, complex)):
        return literal(value)
    scope = builder.scope
    raise NeedsInlineError(scope, builder.graph.calls[scope], reason=str(value))


def _tensor(builder: BodyBuilder, tensor: str) -> Expression:
    if tensor not in builder.graph.tensors:
        return literal(None)  # nothing that the loss depends on
    left = builder.opening.leaves.get(tensor)
    layout = builder.have.get(tensor, builder.split.made(tensor))
    need = left[1] if left is not None and left[0] == builder.scope else layout
    return builder.value(tensor, WHOLE if tensor == builder.graph.loss else need)


def show_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Have an evaluation find the outputs in `for_metrics`; return which parts are not at hand.

    A forward that goes on to the loss returns that alone.
    """
    before = len(builder.lines)
    shown = whole_outputs(builder, value)
    builder.lines.append(
        Line(results=None, expression=SourceForm(("self.for_metrics = ", Slot(shown))))
    )
    builder.only_in_evaluations(before)
    return absent_outputs(builder, value)


def absent_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Return the parts of the outputs that code does not make: `outputs.preds`, say."""
    found = leaves(value, "outputs")
    return tuple(_named(place) for place, part in found if _is_absent(builder, part))


def _named(place: str) -> str:
    return place.replace('"', "'")  # messages stand in strings


def _is_absent(builder: BodyBuilder, part: Value) -> bool:
    """Whether code lacks a part of the outputs: the loss does not need it, or it is an object."""
    if isinstance(part, Ref):
        return part.tensor not in builder.have
    is_object = isinstance(part, str) and part.startswith("<")
    return is_object or not isinstance(part, (str, bool, int, float, complex, NoneType))


def whole_outputs(builder: BodyBuilder, value: Value, place: str = "outputs") -> Expression:
    """Return outputs as the model gives them, whole on each rank; `place` is the code for them."""
    inner = [whole_outputs(builder, one, where) for where, one in held(value, place)]
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
    builder = _given_outputs(opening)
    bind_batch(builder)
    for op in opening.tree.ops[LOSS]:
        if op.call == LOSS:
            builder.add(op)
    body = builder.body(builder.value(opening.split.graph.loss, WHOLE))
    return _loss_function("split_loss", builder, body, returns="Tensor", what="loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedMetrics:
    """The source of `whole_metrics(outputs, batch, tensor)`, and the outputs that it lacks."""

    source: str
    absent: tuple[str, ...]


def printed_metrics(opening: Opening) -> PrintedMetrics | None:
    """Return what measures the outputs of a forward; None if each rank has all of them whole."""
    builder = _given_outputs(opening)
    result = opening.split.graph.calls[ROOT].result
    absent = absent_outputs(builder, result) if ROOT in opening.opened else ()
    is_whole = all(
        one.kind in (LayoutKind.WHOLE, LayoutKind.REPLICATED) for one in builder.have.values()
    )
    if is_whole and not absent:
        return None
    outputs = whole_outputs(builder, result)
    body = builder.body(call("new_metrics", outputs, text("batch")))
    returns = "Mapping[str, Tensor]"
    source = _loss_function("whole_metrics", builder, body, returns=returns, what="metrics")
    return PrintedMetrics(source=source, absent=absent)


def _given_outputs(opening: Opening) -> BodyBuilder:
    """Return what builds a function that is given what the model returns."""
    builder = BodyBuilder(opening, LOSS, axis="tensor")
    result = opening.split.graph.calls[ROOT].result
    _bind_outputs(builder, result, "outputs")
    return builder


def _bind_outputs(builder: BodyBuilder, value: Value, place: str) -> None:
    """Have at hand the tensors of the outputs, which code reaches at a place."""
    if isinstance(value, Ref):
        if value.tensor in builder.graph.tensors:
            builder.bind(
                LocalTensor(value.tensor, builder.opening.arrives(value.tensor, LOSS)), place
            )
    elif is_plain(value) and any(refs(value)):
        builder.bind_pattern(_pattern(builder.opening, value), place)
    else:
        for inner, one in held(value, place):
            _bind_outputs(builder, one, inner)


def _loss_function(name: str, builder: BodyBuilder, body: Body, *, returns: str, what: str) -> str:
    style = Style(axis="tensor", indent=4)
    head = wrapped_definition(name, [*_ARGUMENTS], returns, indent=0)
    doc = f'    """Return the {what} of outputs that are split over the tensor axis."""'
    return "\n".join([*head, doc, *written(body, builder.owner, style)]) + "\n"


def bind_batch(builder: BodyBuilder) -> None:
    """Have the batch's tensors at hand as `batch["key"]`."""
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
    """A subclass of one of the model's classes, and the modules that take it.

    `source` calls the class as `base` has it. A class with `uses_axis` has an attribute `tensor`,
    the tensor axis of the mesh, which the script sets.
    """

    name: str
    base: Imported
    instances: tuple[str, ...]
    source: str
    uses_axis: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingTensor:
    """A tensor that one stage gives to the next; its shape is the whole one, before any split."""

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    layout: Layout
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClass:
    """The root's subclass for one pipeline stage (or for the whole model, where there is one).

    Its forward takes `takes` by position and the batch by keyword, and returns `gives`; the last
    one returns what the model returns, or the loss itself where `returns_loss`: then it shows the
    outputs to evaluations that have metrics, all but what is `absent`. `modules` are the modules
    that it calls or reads; the script drops the others. `bounds` are attributes that the script
    sets: stages of one form share one class and differ in these numbers. `crossing` is the source
    of a function that tells the shapes of what it gives, where these vary.
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
    """The source that a plan needs beside the user's own.

    `stages` is empty where the root is called as it is. `loss` is the source of a function
    `split_loss(outputs, batch, tensor)` where the loss must be split, None where the user's own
    (or the model's) is right; `metrics` is that of `whole_metrics(outputs, batch, tensor)`, where
    ranks have shares of the outputs, and `absent` are parts of the outputs that no metric can be
    made of, for the code here does not make them. `valid_targets` is the source of a function of
    the batch that counts the targets in the mean of the loss, None where every row counts alike;
    `weighs_terms` where these are several means, and the code here multiplies each by its own
    weight. `divisor` is the source of a function of such counts where the loss divides by what it
    makes of them (at least one, say). `imports` are lines.
    `inlined` are the calls of modules whose code stands in their caller's: nothing calls them.
    `functions` are those of the model's files that the code here calls. `own_rows` are the keys of
    the batch of which a tensor rank is given its rows alone; `splits_rows` where tensor ranks have
    shares of any rows.
    """

    classes: tuple[OpenedClass, ...]
    stages: tuple[StageClass, ...]
    loss: str | None
    metrics: str | None
    valid_targets: str | None
    weighs_terms: bool
    divisor: str | None
    imports: tuple[str, ...]
    inlined: frozenset[str]
    functions: tuple[Imported, ...] = ()
    own_rows: tuple[str, ...] = ()
    splits_rows: bool = False
    absent: tuple[str, ...] = ()
