"""Turns the ops of one printed call into lines: what each computes, in the order they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.codegen.forward.at_hand import AtHand
from autopar.codegen.forward.function_calls import function_line
from autopar.codegen.forward.local_sizes import local_arguments, result_sizes
from autopar.codegen.forward.module_calls import call_line, unnamed_function
from autopar.codegen.forward.opening.changes import is_split_random
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.ops.operations import Place, base_name, gives_many, printed
from autopar.codegen.forward.ops.sizes import whole_sizes
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.split_ops import rewritten
from autopar.codegen.forward.text.expressions import Expression, Held, call, joined, text
from autopar.codegen.forward.text.lines import Body, Line
from autopar.codegen.forward.text.repeats import Repeats
from autopar.planner.errors import InputError
from autopar.planner.extent import Extent
from autopar.planner.ops import Op, Origin
from autopar.planner.rules.random_ops import is_random
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of

LOSS_WEIGHTS = "loss_weights"  # the name that a microbatch has for them


def _counts_from_zero(op: Op) -> bool:
    """Whether an op makes a range that is as long as its end says."""
    given = dict(op.arguments)
    is_whole = given.get("start", 0) == 0 and "step" not in given
    return kind_of(op) is OpKind.RANGE and is_whole


class BodyBuilder(AtHand):
    """Builds the body of one call from its ops; values that come in are bound first."""

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
        self.repeats = Repeats(self.graph)
        self.called: set[str] = set()
        self.in_functions: set[str] = set()  # ops that run in the calls of plain functions

    def add(self, op: Op) -> None:
        """Add an op, or the call of the module that hides it."""
        unit = self.unit(op)
        if unit is None:
            if op.name not in self.in_functions and not self._add_function(op):
                self._add_op(op)
        elif unit not in self.called:
            self.called.add(unit)
            self.add_line(call_line(unit, self))

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
                self.add_line(line)
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
        expression = rewritten(op, self)
        if expression is None:
            expression = printed(op, self._place(op))
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
                is_ordered=is_ordered,
                has_gradient=op.grad_enabled,
                is_random=is_split_random(op, self.split),
                hint=base_name(op.target),
                names=tuple(self.tree.named.get(name, "") for name in op.outputs),
            )
        )

    def alias(self, op: Op) -> None:
        """Let the result of an op be another name for its input."""
        source = self.value(op.inputs[0], self.split.need(op, 0), op)
        if isinstance(source, Held):
            self.rename(self._made(op.outputs[0]), source)
            return
        raise InputError(f"{op.name} only renames what the module holds", where=op.location)

    def _is_nothing(self, op: Op) -> bool:
        """Whether an op takes all of a dim; what the module itself holds is taken as it says."""
        if kind_of(op) is not OpKind.PART:
            return False
        given, made = (self.graph.tensors[name] for name in (op.inputs[0], op.outputs[0]))
        is_activation = given.origin in (Origin.OP, Origin.INPUT)
        others = (self.split.lengths.shape(one.name) for one in (given, made))
        keeps_all = given.shape == made.shape and len(set(others)) == 1
        return keeps_all and is_activation and not self.reads_written(op)

    def _made(self, tensor: str) -> Held:
        return Held(tensor, self.split.made(tensor))

    def _place(self, op: Op) -> Place:
        """Return what the printing of an op needs to know of its surroundings."""
        return Place(
            inputs=self.inputs(op),
            training=self.owner.training(op),
            dtype=self.dtype(),
            device=self.device(),
            sizes=self._sizes(op),
            rate=self.owner.rate(op),
            scale=self.owner.scale(op),
        )

    def _sizes(self, op: Op) -> dict[str, Expression]:
        """Return the arguments of an op that are sizes, read from shapes where that is possible."""
        name = rule_of(op.target).sizes
        if name:
            given = op.argument(name)
            assert isinstance(given, tuple)
            return {name: result_sizes(op, given, self)}
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
        return found | local_arguments(op, self)

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
