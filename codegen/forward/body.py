"""Builds the body of a printed forward, op by op, as a rank runs it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.codegen.forward.calls import call_line, function_line, unnamed_function
from autopar.codegen.forward.local_sizes import local_arguments, result_sizes
from autopar.codegen.forward.opening import Opening, is_split_random
from autopar.codegen.forward.ops.arguments import (
    PrintedPlace,
    base_name,
    explained,
    whole_number,
)
from autopar.codegen.forward.ops.sizes import wanted
from autopar.codegen.forward.ops.special_ops import gives_many, printed, split_call
from autopar.codegen.forward.ops.table import SPLIT_FUNCTIONS, Function
from autopar.codegen.forward.reading.author_names import formulas_given
from autopar.codegen.forward.reading.forward_source import LOSS
from autopar.codegen.forward.scope import AvailableValues
from autopar.codegen.text.expressions import (
    Binding,
    Computed,
    Expression,
    Fact,
    LocalTensor,
    SourceForm,
    binary,
    call,
    computed,
    joined,
    literal,
    method,
    text,
    with_numbers,
)
from autopar.codegen.text.lines import Body, ComputedValues, Line, values_in
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import PARTIAL, WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import ONE, Extent, Op, Ref, TensorOrigin
from autopar.planner.programs.layouts.opened import argument, split_form
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.table import kind_of, rule_of


def rewritten(op: Op, body: AvailableValues) -> SourceForm | None:
    """Return the special form that an op needs on a rank, or None if the usual form is correct."""
    split = body.split
    rule = rule_of(op.target)
    if rule.kind is OpKind.PARTS and rule.cuts and _are_alike(op, body):
        dim = literal(whole_number(op.argument("dim")))
        count = literal(len(op.outputs))
        return method(body.inputs(op)[0], "chunk", count, keywords=(("dim", dim),))
    if op.target.startswith("aten.squeeze.") and split.need(op, 0).kind is LayoutKind.SPLIT:
        return _squeezed(op, body)
    if op.target == "aten.histc.default" and _is_whole_numbered(op, body):
        return _histogram(op, body)
    bias = late_bias(op, body)
    if bias is not None:
        body.late_biases[op.outputs[0]] = bias
        operands = [body.value(name, split.need(op, i), op) for i, name in enumerate(op.inputs[:2])]
        return call("F.linear", *operands)
    return None


def _squeezed(op: Op, body: AvailableValues) -> SourceForm:
    """Print a squeeze that names its dims; a bare one would drop a split dim of local size 1."""
    shape = body.graph.tensors[op.inputs[0]].shape
    given = argument(op, "dim")
    asked = given if isinstance(given, tuple) else range(len(shape)) if given is None else (given,)
    places = {whole_number(dim) % len(shape) for dim in asked}
    dims = [literal(place) for place in sorted(places) if shape[place] == ONE]
    return method(body.inputs(op)[0], "squeeze", dims[0] if len(dims) == 1 else joined(tuple(dims)))


def _is_whole_numbered(op: Op, body: AvailableValues) -> bool:
    return body.graph.tensors[op.inputs[0]].is_whole_numbered


def _histogram(op: Op, body: AvailableValues) -> SourceForm:
    """Print a histogram of integers as one of floats, which every device supports."""
    borders = tuple((key, body.plain_size(op.argument(key))) for key in ("bins", "min", "max"))
    counted = call("torch.histc", method(body.inputs(op)[0], "float"), keywords=borders)
    return method(counted, "to", text(f"torch.{body.graph.tensors[op.outputs[0]].dtype}"))


def _are_alike(op: Op, body: AvailableValues) -> bool:
    """Whether an op's results have equal sizes, so that it can be printed as `chunk`."""
    dim = whole_number(op.argument("dim"))
    sizes = {wanted(body.split, t, body.split.made(t))[dim].extent for t in op.outputs}
    return len(sizes) == 1 and len(op.outputs) > 1


def _split_call(op: Op, function: Function, body: BodyBuilder) -> SourceForm:
    """Return the call of the runtime's function for a split op."""
    layout, place = body.split.need(op, 0), body.place(op)
    first, *others = place.inputs
    is_last = layout.dim == len(body.graph.tensors[op.inputs[0]].shape) - 1
    if function.splits_last and not is_last:
        first = method(first, "movedim", literal(layout.dim), literal(-1))
    cut = body.split.axes.dims[op.inputs[0]][layout.dim], layout.axis
    parts = {} if body.sizes.are_even(*cut) else {"parts": body.sizes.listed(*cut)}
    place = replace(place, inputs=(first, *others))
    return split_call(op, place, function, {"axis": body.axis} | parts)


def share_of(op: Op, mean: SourceForm, body: AvailableValues) -> SourceForm:
    """Return the mean of a rank's part of a dim, multiplied by the rank's share of the dim.

    Over all ranks, these products add up to the mean of the whole dim. Adding up plain sums, and
    dividing afterwards, would be inaccurate in 16 bits, because sums are large.
    """
    need = body.split.need(op, 0)
    size = wanted(body.split, op.inputs[0], need)[need.dim]
    if not size.varies and body.sizes.is_shared_evenly(size.dim, size.axis):
        return body.sizes.per_rank(mean, "/")
    whole = body.sizes.whole(size.extent, size.other)
    share = binary(body.sizes.local(size), "/", whole, Binding.PRODUCT)
    return binary(mean, "*", share, Binding.PRODUCT)


def late_bias(op: Op, body: AvailableValues) -> str | None:
    """Return the bias of a row-parallel linear, if it may be added after the sum over ranks.

    Added before the sum, it would count once for each rank. Its gradient is computed from the
    sum's gradient, so both must be whole, or both partial sums.
    """
    bias = op.argument("bias") if op.target == "aten.linear.default" else None
    if not isinstance(bias, Ref) or body.split.made(op.outputs[0]).kind is not LayoutKind.PARTIAL:
        return None
    out, held_as = op.outputs[0], body.split.made(bias.tensor).kind
    ways = [
        (body.split.layouts_of(user, i)[1:], user)
        for user in body.graph.index.readers[out]
        for i, name in enumerate(user.inputs)
        if name == out
    ]
    needs = [
        (way[0], body.opening.places.get((user.name, out, way[0]))) if way else (PARTIAL, None)
        for way, user in ways
    ]
    left = body.opening.leaves.get(out)
    if left is not None:
        needs = [(left[1], left[0])]
    last = len(body.graph.tensors[out].shape) - 1
    fits = (place == body.scope and _same_gradient(held_as, need, last) for need, place in needs)
    return bias.tensor if needs and all(fits) else None


def _same_gradient(bias: LayoutKind, sum_: Layout, last: int) -> bool:
    match sum_.kind:
        case LayoutKind.WHOLE | LayoutKind.REPLICATED:
            return bias is sum_.kind
        case LayoutKind.SPLIT:
            return bias is LayoutKind.REPLICATED and sum_.dim != last
        case _:
            return False


LOSS_WEIGHTS = "loss_weights"  # a key of the microbatch: one weight for each mean in the loss


def _counts_from_zero(op: Op) -> bool:
    """Whether an op makes a range that starts at zero, with step one."""
    given = dict(op.arguments)
    is_whole = given.get("start", 0) == 0 and "step" not in given
    return kind_of(op) is OpKind.RANGE and is_whole


class BodyBuilder(AvailableValues):
    """Builds the body of a printed function: first bind its arguments, then add its ops."""

    def __init__(
        self,
        opening: Opening,
        scope: str,
        *,
        axis: str = "self.tensor",
        ops: Sequence[Op] | None = None,
    ) -> None:
        super().__init__(opening, scope, axis=axis, ops=ops)
        self.loss_weights = f'batch["{LOSS_WEIGHTS}"]' if scope == LOSS else LOSS_WEIGHTS
        self.repeats = ComputedValues(self.graph)
        self.called: set[str] = set()
        self.in_functions: set[str] = set()  # ops of the author's functions that this body calls

    def add(self, op: Op) -> None:
        """Add an op, or the call of the module or function that runs it."""
        unit = self.unit(op)
        if unit is None:
            if op.name not in self.in_functions and not self._add_function(op):
                self._add_op(op)
        elif unit not in self.called:
            self.called.add(unit)
            self.add_line(call_line(unit, self))

    def _add_function(self, first: Op) -> bool:
        """Call the author's function that begins with an op; return False if none can be called."""
        for function in self.graph.index.functions[first.name]:
            names = set(function.ops)
            place = self._places[first.name]
            ops = self.ops[place : place + len(names)]
            if {op.name for op in ops} != names or any(self.unit(op) for op in ops):
                continue
            line = function_line(function, ops, self)
            if line is not None:
                self.in_functions |= names
                self.add_line(line)
                return True
        return False

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {op.name: place for place, op in enumerate(self.ops)}

    def unit(self, op: Op) -> str | None:
        """Return the call in this body that runs an op, or None if the op itself is printed."""
        return self.opening.unit(op, self.scope)

    def _add_op(self, op: Op) -> None:
        if op.call != self.scope and op.call != LOSS and self.graph.calls[op.call].is_function:
            raise unnamed_function(self.graph.calls[op.call], op)
        if self._is_nothing(op):
            self.alias(op)
            return
        expression = self._in_split_form(op) or rewritten(op, self) or self._usual(op)
        why = explained("", expression)
        if op.name in self.split.weighed:
            number = self.split.weighed.index(op.name)
            expression = call("scale_loss", expression, text(f"{self.loss_weights}[{number}]"))
            self.unpacked.add(LOSS_WEIGHTS)
        made = tuple(map(self._made, op.outputs))
        is_ordered = is_random(op) or bool(op.writes) or self.reads_written(op)
        if not is_ordered and not gives_many(op):
            earlier = self.repeats.earlier(expression, made[0])
            if earlier is not None:
                self.rename(made[0], earlier)
                return
        self.add_line(
            Line(
                results=made if gives_many(op) else made[0],
                expression=expression,
                reason=why,
                is_ordered=is_ordered,
                has_gradient=op.grad_enabled,
                is_random=is_split_random(op, self.split),
                hint=base_name(op.target),
            )
        )

    def _in_split_form(self, op: Op) -> SourceForm | None:
        """Return an op in the special form that its rule declares for its layout, or None."""
        layout = self.split.ops.get(op.name)
        form = split_form(op, layout, self.split.axes) if layout is not None else None
        if form is None:
            return None
        if form.function:
            return _split_call(op, SPLIT_FUNCTIONS[form.function], self)
        return share_of(op, self._usual(op), self)

    def _usual(self, op: Op) -> SourceForm:
        """Print an op as PyTorch's function."""
        return self._with_settings(op, printed(op, self.place(op)))

    def _with_settings(self, op: Op, printed_op: SourceForm) -> SourceForm:
        """Return a printed op with the author's attributes (`self.eps`) for float literals."""
        found: dict[SourceForm, SourceForm] = {}
        for _, value in op.arguments if self.scope != LOSS else ():
            if isinstance(value, float):
                own = self.owner.setting(op.call, op.spans, value) or self._formula(op, value)
                found |= {literal(value): own} if own is not None else {}
        return with_numbers(printed_op, found) if found else printed_op

    def _formula(self, op: Op, value: float) -> SourceForm | None:
        """Return the author's arithmetic for a number (`self.dim**-0.5`), if code can repeat it."""
        for formula in (one for span in op.spans[:1] for one in formulas_given(span)):

            def known(tree: ast.expr, beside: str = formula.beside) -> Computed | None:
                return self.owner.number(op, tree) or self._size(op, tree, beside)

            found = computed(formula.tree, known)
            if found is not None and found[0] == value and isinstance(found[1], SourceForm):
                return found[1]
        return None

    def _size(self, op: Op, tree: ast.expr, beside: str) -> Computed | None:
        """Return the value and expression of `x.shape[-1]`.

        `x` is the op's only tensor, if the source calls it `beside`, or an earlier value.
        """
        match tree:
            case (
                ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=place)
                | ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[place])
            ):
                number, name = computed(place, lambda _: None), ast.unparse(owner)
            case _:
                return None
        if name == beside and len(op.inputs) == 1:
            local: Expression | None = self.value(op.inputs[0], self.split.need(op, 0), op)
        else:
            local = self._latest(name)
        if number is None or not isinstance(local, LocalTensor):
            return None
        dim, shape = int(number[0]), self.graph.tensors[local.tensor].shape
        if not -len(shape) <= dim < len(shape):
            return None
        is_part = local.layout.kind is LayoutKind.SPLIT and local.layout.dim == dim % len(shape)
        if is_part or not shape[dim].is_constant:
            return None
        return shape[dim].at(0), Fact(local, f"shape[{dim}]")

    def _latest(self, name: str) -> LocalTensor | None:
        """Return the last value so far that the source calls by this name."""
        made = (
            local
            for line in reversed(self.lines)
            for local in values_in(line.results)
            if name in self.tree.names_in(self.scope, local.tensor)
        )
        return next(made, None)

    def alias(self, op: Op) -> None:
        """Make an op's result an alias of its input."""
        source = self.value(op.inputs[0], self.split.need(op, 0), op)
        if isinstance(source, LocalTensor):
            self.rename(self._made(op.outputs[0]), source)
            return
        raise InputError(
            f"a printed forward cannot rename a tensor that the module holds, as {op.name} does",
            where=op.location,
            fix="use the tensor itself in place of this op's result",
        )

    def _is_nothing(self, op: Op) -> bool:
        """Whether an op slices a whole dim of an activation or input, so that nothing changes."""
        if kind_of(op) is not OpKind.PART:
            return False
        given, made = (self.graph.tensors[name] for name in (op.inputs[0], op.outputs[0]))
        is_activation = given.origin in (TensorOrigin.OP, TensorOrigin.INPUT)
        if given.shape != made.shape or not is_activation or self.reads_written(op):
            return False
        return len({self.split.lengths.shape(one.name) for one in (given, made)}) == 1

    def _made(self, tensor: str) -> LocalTensor:
        return LocalTensor(tensor, self.split.made(tensor))

    def place(self, op: Op) -> PrintedPlace:
        """Return the context for printing an op."""
        return PrintedPlace(
            inputs=self.inputs(op),
            training=self.owner.training(op),
            dtype=self.dtype(),
            device=self.device(),
            sizes=self._sizes(op),
            rate=self.owner.rate(op),
            scale=self.owner.scale(op),
        )

    def _sizes(self, op: Op) -> dict[str, Expression]:
        """Return the size arguments of an op, read from shapes if possible."""
        name = rule_of(op.target).sizes
        if name:
            given = op.argument(name)
            assert isinstance(given, tuple)
            return {name: result_sizes(op, given, self)}
        found: dict[str, Expression] = {}
        for key, value in op.arguments:
            other = self.split.lengths.argument(op, key)
            if key == "end" and _counts_from_zero(op):
                length = self.sizes.of_all(wanted(self.split, op.outputs[0], WHOLE))[0]
                found[key] = self.plain_size(value, other) if length is None else length
            elif isinstance(value, Extent) or (value != other and isinstance(value, int)):
                found[key] = self.plain_size(value, other)
            elif (
                isinstance(value, tuple)
                and isinstance(other, tuple)
                and (value != other or any(isinstance(v, Extent) for v in value))
            ):
                found[key] = joined(tuple(map(self.plain_size, value, other)))
        return found | local_arguments(op, self)

    def only_in_evaluations(self, since: int) -> None:
        """Mark the lines from number `since` on as needed in evaluations only."""
        own = [replace(line, only_evaluates=True) for line in self.lines[since:]]
        self.lines[since:] = own

    def body(self, result: Expression | None) -> Body:
        """Return the finished body."""
        return Body(
            axis=str(self.axis.parts[0]),
            arguments=dict(self.arguments),
            containers=frozenset(self.unpacked),
            lines=tuple(self.lines),
            result=result,
        )
