"""Turns the ops of one printed call into lines: what each computes, in the order they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.codegen.forward.function_calls import function_line
from autopar.codegen.forward.module_calls import call_line, unnamed_function
from autopar.codegen.forward.opening.changes import is_split_random
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.ops import conversions, special
from autopar.codegen.forward.ops.operations import Place, base_name, gives_many, printed
from autopar.codegen.forward.ops.sizes import Sizes, whole_sizes
from autopar.codegen.forward.owned import NeedsInlineError, Owner
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    Held,
    Level,
    binary,
    call,
    joined,
    method,
    text,
)
from autopar.codegen.forward.text.lines import Body, Line, Pattern, held_in
from autopar.codegen.forward.text.literals import literal
from autopar.codegen.forward.text.repeats import Repeats
from autopar.planner.errors import InputError
from autopar.planner.extent import Extent
from autopar.planner.layouts import Layout
from autopar.planner.ops import Op, Origin, Value, size
from autopar.planner.rules.random_ops import is_random
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of

LOSS_WEIGHTS = "loss_weights"  # the name that a microbatch has for them


def _counts_from_zero(op: Op) -> bool:
    """Whether an op makes a range that is as long as its end says."""
    given = dict(op.arguments)
    is_whole = given.get("start", 0) == 0 and "step" not in given
    return kind_of(op) is OpKind.RANGE and is_whole


class BodyBuilder:
    """Builds the body of one call from its ops; values that come in are bound first."""

    def __init__(
        self,
        opening: Opening,
        scope: str,
        *,
        axis: str = "self.tensor",
        ops: Sequence[Op] | None = None,  # those of the call that this body computes, if not all
    ) -> None:
        self.opening, self.scope = opening, scope
        self.ops = opening.tree.ops.get(scope, ()) if ops is None else ops
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.owner = Owner(self.split, "" if scope == LOSS else self.graph.calls[scope].path)
        self.axis = text(axis)
        self.loss_weights = f'batch["{LOSS_WEIGHTS}"]' if scope == LOSS else LOSS_WEIGHTS
        self.sizes = Sizes(self.split, self.axis)
        self.have: dict[str, Layout] = {}
        self.same: dict[Held, Held] = {}  # results of ops that do nothing, or nothing new
        self.repeats = Repeats(self.graph)
        self.defined: set[Held] = set()
        self.arguments: dict[Held, str] = {}
        self.lines: list[Line] = []
        self.unpacked: set[str] = set()  # arguments that are containers
        self.containers: dict[Expression, str] = {}  # these, by what they hold
        self.called: set[str] = set()
        self.in_functions: set[str] = set()  # ops that run in the calls of plain functions
        self.late_biases: dict[str, str] = {}  # linear → its bias, added after the partial sums
        own = self.tree.ops.get(scope, ())
        self.written = set[str]().union(*map(self.graph.index.written_by, own))

    # --- what comes in ---------------------------------------------------------------------------

    def bind(self, held: Held, name: str) -> None:
        """Have a value from outside under a name."""
        if held.tensor not in self.have:
            self.arguments[held] = name
            self.define(held)
            self.sizes.add_argument(held)

    def copy(self, held: Held) -> None:
        """Have an argument in memory of this body's own, to which it may write."""
        why = "to write into: what is received is a leaf"
        copied = method(held, "clone")
        self.lines.append(Line(results=held, expression=copied, is_ordered=True, reason=why))

    def bind_pattern(self, pattern: Pattern, source: str, names: tuple[str, ...] = ()) -> None:
        """Have the values inside a container from outside, under names if they are all plain."""
        new = [held for held in held_in(pattern) if held.tensor not in self.have]
        if new:
            self.unpacked.add(source.partition("[")[0])
            self.lines.append(Line(results=pattern, expression=text(source), names=names))
            for held in new:
                self.define(held)
            if isinstance(pattern, tuple) and all(isinstance(item, Held) for item in pattern):
                self.containers[joined(tuple(held_in(pattern)))] = source

    def define(self, held: Held) -> None:
        """Have a value at hand from here on."""
        self.have.setdefault(held.tensor, held.layout)
        self.defined.add(held)
        self.sizes.add(held)

    def at_hand(self, tensor: str, need: Layout) -> Held | None:
        """Return an input of an op as a value, None where it is something the module holds."""
        value = self.value(tensor, need)
        return value if isinstance(value, Held) else None

    # --- steps -----------------------------------------------------------------------------------

    def add(self, op: Op) -> None:
        """Add an op, or the call of the module that hides it."""
        unit = self.unit(op)
        if unit is None:
            if op.name not in self.in_functions and not self._add_function(op):
                self._add_op(op)
        elif unit not in self.called:
            self.called.add(unit)
            line = call_line(unit, self)
            self.lines.append(line)
            for held in held_in(line.results):
                self.define(held)

    def _add_function(self, first: Op) -> bool:
        """Add the call of a function that begins with an op, if one can be called here."""
        for function in self.graph.index.functions[first.name]:
            names = set(function.ops)
            place = self._places[first.name]
            ops = self.ops[place : place + len(names)]
            if {op.name for op in ops} != names or any(self.unit(op) for op in ops):
                continue
            line = function_line(function, ops, self)
            if line is not None:
                self.in_functions |= names
                self.lines.append(line)
                for held in held_in(line.results):
                    self.define(held)
                return True
        return False

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {op.name: place for place, op in enumerate(self.ops)}

    def unit(self, op: Op) -> str | None:
        """Return the call directly below this body in which an op runs, None for its own ops."""
        return self.opening.unit(op, self.scope)

    def _add_op(self, op: Op) -> None:
        if op.call != self.scope and op.call != LOSS and self.graph.calls[op.call].is_function:
            raise unnamed_function(self.graph.calls[op.call], op)
        if self._is_nothing(op):
            self.alias(op)
            return
        rewritten = special.rewritten(op, self)
        expression = rewritten if rewritten is not None else printed(op, self.place(op))
        if op.name in self.split.weighed:
            number = self.split.weighed.index(op.name)
            expression = call("scale_loss", expression, text(f"{self.loss_weights}[{number}]"))
            self.unpacked.add(LOSS_WEIGHTS)
        made = tuple(map(self._made, op.outputs))
        is_ordered = is_random(op) or bool(op.writes) or self.reads_written(op)
        if not is_ordered and not gives_many(op):
            earlier = self.repeats.earlier(expression, made[0])
            if earlier is not None:
                self._rename(made[0], earlier)
                return
        self.lines.append(
            Line(
                results=made if gives_many(op) else made[0],
                expression=expression,
                is_ordered=is_ordered,
                has_gradient=op.grad_enabled,
                is_random=is_split_random(op, self.split),
                hint=base_name(op.target),
                names=tuple(self.tree.named.get(name, "") for name in op.outputs),
            )
        )
        for held in made:
            self.define(held)

    def alias(self, op: Op) -> None:
        """Let the result of an op be another name for its input."""
        source = self.value(op.inputs[0], self.split.need(op, 0), op)
        if isinstance(source, Held):
            self._rename(self._made(op.outputs[0]), source)
            return
        raise InputError(f"{op.name} only renames what the module holds", where=op.location)

    def _rename(self, made: Held, source: Held) -> None:
        self.same[made] = source
        self.have.setdefault(made.tensor, made.layout)

    def _is_nothing(self, op: Op) -> bool:
        """Whether an op takes all of a dim; what the module itself holds is taken as it says."""
        if kind_of(op) is not OpKind.PART:
            return False
        given, made = (self.graph.tensors[name] for name in (op.inputs[0], op.outputs[0]))
        is_activation = given.origin in (Origin.OP, Origin.INPUT)
        others = (self.split.lengths.shape(one.name) for one in (given, made))
        keeps_all = given.shape == made.shape and len(set(others)) == 1
        return keeps_all and is_activation and not self.reads_written(op)

    def reads_written(self, op: Op) -> bool:
        """Whether an op touches memory that this body writes to."""
        return not self.written.isdisjoint(self.graph.index.storages((*op.inputs, *op.outputs)))

    def _made(self, tensor: str) -> Held:
        return Held(tensor, self.split.made(tensor))

    # --- what steps use --------------------------------------------------------------------------

    def value(self, tensor: str, need: Layout, op: Op | None = None) -> Expression:
        """Return a tensor in the layout in which it is needed, converted first if it must be."""
        known = self.graph.tensors[tensor]
        if known.origin not in (Origin.OP, Origin.INPUT) and tensor not in self.have:
            own = self.owner.tensor(tensor, op, self)
            return conversions.convert_own(own, tensor, need, self)
        if tensor not in self.have:
            raise NeedsInlineError.for_tensor(tensor, self)
        held = Held(tensor, self.have[tensor])
        crossing = self.split.crossing.get(tensor)
        layers = self.split.layer_of
        is_used_outside = op is None or layers.get(tensor) != layers[op.name]
        if crossing not in (None, held.layout, need) and is_used_outside:
            assert crossing is not None
            return self._converted(Held(tensor, crossing), Held(tensor, need), op)
        return self._converted(held, Held(tensor, need), op)

    def _converted(self, held: Held, wanted: Held, op: Op | None) -> Expression:
        if held.layout == wanted.layout:
            return self.same.get(held, held)
        if held.layout != self.have[held.tensor]:
            self.value(held.tensor, held.layout, op)
        if wanted not in self.defined:
            self.lines.append(self._conversion(held, wanted))
            self.define(wanted)
            self.sizes.add_converted(wanted)
        return wanted

    def _conversion(self, held: Held, wanted: Held) -> Line:
        users = [o for o in self.graph.index.readers[held.tensor] if self._converts_for(o, wanted)]
        source = self.same.get(held, held)
        converted: Expression = conversions.convert(source, wanted, held, self)
        if held.tensor in self.late_biases:
            maker = self.graph.index.made_by[held.tensor]
            bias = self.owner.tensor(self.late_biases[held.tensor], maker, self)
            converted = binary(converted, "+", bias, Level.SUM)
        if self.graph.index.is_written_later(wanted.tensor):  # never into what others still read
            converted = method(converted, "clone")
        return Line(
            results=wanted,
            expression=converted,
            reason=conversions.reason(held, wanted, users, self),
        )

    def _converts_for(self, op: Op, wanted: Held) -> bool:
        return any(
            name == wanted.tensor and wanted.layout in self.split.way(op, i)[1:]
            for i, name in enumerate(op.inputs)
        )

    def inputs(self, op: Op) -> tuple[Expression, ...]:
        """Return the inputs of an op in the layouts that it needs."""
        return tuple(
            self.value(name, self.split.need(op, i), op) for i, name in enumerate(op.inputs)
        )

    def place(self, op: Op) -> Place:
        """Return what the printing of an op needs to know of its surroundings."""
        return Place(
            inputs=self.inputs(op),
            training=self.owner.training(op),
            dtype=self.dtype(),
            device=self.device(),
            sizes=self._sizes(op),
            rate=self.owner.rate(op),
        )

    def dtype(self) -> Expression | None:
        """Return the model's own floating type, as some value at hand has it."""
        for held in self._at_hand():
            if self.graph.tensors[held.tensor].dtype == "model":
                return Fact(held, "dtype")
        return self.owner.parameter_fact("dtype", self.ops)

    def device(self) -> Expression | None:
        """Return the device, as some value at hand has it."""
        held = next(self._at_hand(), None)
        if held is not None:
            return Fact(held, "device")
        return self.owner.parameter_fact("device", self.ops)

    def _at_hand(self) -> Iterator[Held]:
        arguments = [held for held in self.sizes.seen if held in self.arguments]
        yield from (*arguments, *(h for h in self.sizes.seen if h not in self.arguments))

    def _sizes(self, op: Op) -> dict[str, Expression]:
        """Return the arguments of an op that are sizes, read from shapes where that is possible."""
        name = rule_of(op.target).sizes
        if name:
            given = op.argument(name)
            assert isinstance(given, tuple)
            return {name: special.result_sizes(op, given, self)}
        found: dict[str, Expression] = {}
        for key, value in op.arguments:
            other = self.split.lengths.argument(op, key)
            if key == "end" and _counts_from_zero(op):
                length = self.sizes.of_all(whole_sizes(self.split, op.outputs[0]))[0]
                found[key] = self.plain_size(value, other) if length is None else length
            elif isinstance(value, Extent) or (value != other and isinstance(value, int)):
                found[key] = self.plain_size(value, other)
            elif (
                isinstance(value, tuple)
                and isinstance(other, tuple)
                and (value != other or any(isinstance(v, Extent) for v in value))
            ):
                found[key] = joined(tuple(map(self.plain_size, value, other)))
        return found | special.local_arguments(op, self)

    def plain_size(self, value: Value, other: Value = None) -> Expression:
        """Return a whole size, or another plain argument, that at other lengths is another."""
        if isinstance(value, Extent) or (type(value) is int and other not in (None, value)):
            more = value if other is None else other
            assert isinstance(more, (int, Extent))
            return self.sizes.whole(size(value), size(more))
        assert value is None or isinstance(value, (bool, int, float, complex, str))
        return literal(value)

    def only_in_evaluations(self, since: int) -> None:
        """Have the lines from this number on run in evaluations alone; nothing else reads them."""
        own = [replace(line, only_evaluates=True) for line in self.lines[since:]]
        self.lines[since:] = own

    def body(self, result: Expression | None) -> Body:
        """Return what was built."""
        return Body(
            arguments=dict(self.arguments),
            containers=frozenset(self.unpacked),
            lines=tuple(self.lines),
            result=result,
        )
