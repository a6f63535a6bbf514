"""Holds what the code of one call has at hand: values in layouts, and the lines that make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.ops import conversions
from autopar.codegen.forward.ops.sizes import Sizes
from autopar.codegen.forward.owned import NeedsInlineError, Owner
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    Form,
    Held,
    Level,
    binary,
    call,
    joined,
    method,
    text,
)
from autopar.codegen.forward.text.lines import Line, Pattern, held_in
from autopar.codegen.forward.text.literals import literal, nested
from autopar.planner.extent import Extent
from autopar.planner.layouts import Layout
from autopar.planner.ops import Op, Origin, Value, size


class AtHand:
    """The values that the code of one call has so far, and how it reaches what its module holds."""

    def __init__(
        self,
        opening: Opening,
        scope: str,
        *,
        axis: str = "self.tensor",
        ops: Sequence[Op] | None = None,  # those of the call that this code computes, if not all
    ) -> None:
        self.opening, self.scope = opening, scope
        self.ops = opening.tree.ops.get(scope, ()) if ops is None else ops
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.owner = Owner(self.split, "" if scope == LOSS else self.graph.calls[scope].path)
        self.axis = text(axis)
        self.sizes = Sizes(self.split, self.axis)
        self.have: dict[str, Layout] = {}
        self.same: dict[Held, Held] = {}  # results of ops that do nothing, or nothing new
        self.defined: set[Held] = set()
        self.arguments: dict[Held, str] = {}
        self.lines: list[Line] = []
        self.unpacked: set[str] = set()  # arguments that are containers
        self.containers: dict[Expression, str] = {}  # these, by what they hold
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

    # --- what lines make -------------------------------------------------------------------------

    def add_line(self, line: Line) -> None:
        """Add a line, and have at hand what it makes."""
        self.lines.append(line)
        for held in held_in(line.results):
            self.define(held)

    def define(self, held: Held) -> None:
        """Have a value at hand from here on."""
        self.have.setdefault(held.tensor, held.layout)
        self.defined.add(held)
        self.sizes.add(held)

    def rename(self, made: Held, source: Held) -> None:
        """Have a value that is another one, under whose name it is read."""
        self.same[made] = source
        self.have.setdefault(made.tensor, made.layout)

    # --- what lines read -------------------------------------------------------------------------

    def value(self, tensor: str, need: Layout, op: Op | None = None) -> Expression:
        """Return a tensor in the layout in which it is needed, converted first if it must be."""
        known = self.graph.tensors[tensor]
        if known.origin not in (Origin.OP, Origin.INPUT) and tensor not in self.have:
            return conversions.convert_own(self.owned(tensor, op), tensor, need, self.sizes)
        if tensor not in self.have:
            raise NeedsInlineError.for_tensor(tensor, self.scope, self.opening)
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
            self.add_line(self._conversion(held, wanted))
            self.sizes.add_converted(wanted)
        return wanted

    def _conversion(self, held: Held, wanted: Held) -> Line:
        users = [o for o in self.graph.index.readers[held.tensor] if self._converts_for(o, wanted)]
        source = self.same.get(held, held)
        converted: Expression = conversions.convert(source, wanted, held, self.sizes)
        if held.tensor in self.late_biases:
            maker = self.graph.index.made_by[held.tensor]
            bias = self.owned(self.late_biases[held.tensor], maker)
            converted = binary(converted, "+", bias, Level.SUM)
        if self.graph.index.is_written_later(wanted.tensor):  # never into what others still read
            converted = method(converted, "clone")
        return Line(
            results=wanted,
            expression=converted,
            reason=conversions.reason(held, wanted, users, self.split),
        )

    def _converts_for(self, op: Op, wanted: Held) -> bool:
        return any(
            name == wanted.tensor and wanted.layout in self.split.way(op, i)[1:]
            for i, name in enumerate(op.inputs)
        )

    def owned(self, tensor: str, op: Op | None) -> Expression:
        """Return a parameter, buffer or constant as this code reaches it."""
        constant = self.graph.constants.get(tensor)
        is_constant = self.graph.tensors[tensor].origin is Origin.CONSTANT
        if is_constant and constant is not None and constant.values is not None:
            return self._numbers(tensor)
        own = self.owner.tensor(tensor, op)
        if own is None:
            raise NeedsInlineError.for_tensor(tensor, self.scope, self.opening)
        return own

    def _numbers(self, constant: str) -> Form:
        own_type = self.graph.tensors[constant].dtype
        dtype = self.dtype() if own_type == "model" else text(f"torch.{own_type}")
        keywords = (("dtype", dtype), ("device", self.device()))
        given = tuple((key, value) for key, value in keywords if value is not None)
        return call("torch.tensor", nested(self.graph.constants[constant].values), keywords=given)

    def inputs(self, op: Op) -> tuple[Expression, ...]:
        """Return the inputs of an op in the layouts that it needs."""
        return tuple(
            self.value(name, self.split.need(op, i), op) for i, name in enumerate(op.inputs)
        )

    def dtype(self) -> Expression | None:
        """Return the model's own floating type, as some value at hand has it."""
        for held in self.values():
            if self.graph.tensors[held.tensor].dtype == "model":
                return Fact(held, "dtype")
        return self.owner.parameter_fact("dtype", self.ops)

    def device(self) -> Expression | None:
        """Return the device, as some value at hand has it."""
        held = next(self.values(), None)
        if held is not None:
            return Fact(held, "device")
        return self.owner.parameter_fact("device", self.ops)

    def values(self) -> Iterator[Held]:
        """Yield the values at hand, arguments first."""
        arguments = [held for held in self.sizes.seen if held in self.arguments]
        yield from (*arguments, *(h for h in self.sizes.seen if h not in self.arguments))

    def plain_size(self, value: Value, other: Value = None) -> Expression:
        """Return a whole size, or another plain argument, that at other lengths is another."""
        if isinstance(value, Extent) or (type(value) is int and other not in (None, value)):
            more = value if other is None else other
            assert isinstance(more, (int, Extent))
            return self.sizes.whole(size(value), size(more))
        assert value is None or isinstance(value, (bool, int, float, complex, str))
        return literal(value)

    def reads_written(self, op: Op) -> bool:
        """Whether an op touches memory that this body writes to."""
        return not self.written.isdisjoint(self.graph.index.storages((*op.inputs, *op.outputs)))
