"""The values that printed code can use: those bound so far, and its module's own tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.ops import arguments as conversions
from autopar.codegen.forward.ops.sizes import ReadableSizes
from autopar.codegen.forward.reading.author_names import attributes_given, caller
from autopar.codegen.forward.reading.forward_source import LOSS
from autopar.codegen.forward.reading.modules import Container
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.text.expressions import (
    Binding,
    Computed,
    Expression,
    Fact,
    LocalTensor,
    SourceForm,
    binary,
    call,
    is_identifier,
    joined,
    literal,
    method,
    nested,
    string,
    text,
)
from autopar.codegen.text.lines import Line, Pattern, values_in
from autopar.planner.errors import InputError, SourceSpan
from autopar.planner.graph.layouts import Layout
from autopar.planner.graph.ops import Extent, Op, TensorOrigin, Value, size
from autopar.planner.programs.layouts.opened import argument
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


class PrintAgainError(Exception):
    """A call cannot be printed with the opened and inlined calls so far: `emit.py` prints again.

    In the next attempt, the call's code is inlined into its caller. If the caller's code only lacks
    an argument of the call (`lacks_argument`), the forward of the called class is printed instead,
    and gets None for this argument.
    """

    def __init__(self, key: str, *, reason: str = "", lacks_argument: bool = False) -> None:
        super().__init__(key)
        self.key, self.reason, self.lacks_argument = key, reason, lacks_argument

    @staticmethod
    def for_module(path: str, scope: str) -> PrintAgainError:
        """Return the error for a module that the code of `scope` cannot reach."""
        return PrintAgainError._for(scope, f"module {path}")

    @staticmethod
    def for_tensor(tensor: str, scope: str, opening: Opening) -> PrintAgainError:
        """Return the error for a tensor that the code of `scope` cannot name."""
        tree = opening.tree
        maker = tree.graph.index.made_by.get(tensor)
        chain = tree.chain(maker) if maker is not None else ()
        key = scope
        if scope in chain:
            below = chain[chain.index(scope) + 1 :]
            key = next((c for c in below if c not in opening.inlined), LOSS)
        return PrintAgainError._for(key, tensor)

    @staticmethod
    def _for(key: str, what: str) -> PrintAgainError:
        if key == LOSS or not key:
            raise InputError(f"the code of the script has no access to {what}, which it needs")
        return PrintAgainError(key)


class Owner:
    """The module whose code is printed, named `self`."""

    def __init__(self, split: SplitGraph, path: str) -> None:
        self.split, self.root = split, path

    def path(self, path: str) -> SourceForm:
        """Return the expression for a module inside this one."""
        return text(f"self{self.steps(path)}")

    def steps(self, path: str) -> str:
        """Return the attribute path from this module to one inside it."""
        path = self.within(path) or path
        inside = path.removeprefix(self.root).removeprefix(".")
        at, steps = self.root, ""
        for name in inside.split(".") if inside else ():
            module = self.split.modules.get(at)
            container = module.container if module is not None else Container.ATTRIBUTE
            if container is Container.INDEX and name.isdigit():
                steps += f"[{int(name)}]"
            elif container is Container.KEY:
                steps += f"[{string(name)}]"
            elif is_identifier(name):
                steps += f".{name}"
            else:
                steps += f".get_submodule({string(name)})"
            at = f"{at}.{name}" if at else name
        return steps

    def within(self, path: str) -> str | None:
        """Return a path inside this module for the module at `path`, or None if it is outside."""
        modules = self.split.modules
        if path == self.root or self.holds(path) or path not in modules:
            return path
        first = modules[path].first
        return next((p for p in modules if modules[p].first == first and self.holds(p)), None)

    def holds(self, name: str) -> bool:
        """Whether a parameter, buffer or module is in this module."""
        return not self.root or name.startswith(f"{self.root}.")

    def tensor(self, name: str, op: Op | None) -> SourceForm | None:
        """Return the expression of a parameter or buffer, or None if another module has it."""
        is_lifted = name.rpartition(".")[2].startswith("lifted_tensor")
        if is_lifted and self.split.graph.tensors[name].origin is TensorOrigin.CONSTANT:
            raise InputError(
                "a forward that must be printed makes a tensor from more than 64 numbers",
                where=op.location if op is not None else "",
                expected="at most 64 numbers, or a buffer of the module",
                fix='make it in __init__: self.register_buffer("table", …, persistent=False)',
            )
        best = self.name_near(name, op)
        if not self.holds(best):
            return None
        owner, _, leaf = best.rpartition(".")
        if not is_identifier(leaf):
            return text(f"self.get_parameter({string(best.removeprefix(self.root).strip('.'))})")
        return text(f"self{self.steps(owner)}.{leaf}")

    def name_near(self, name: str, op: Op | None) -> str:
        """Return a tensor's name in this module; of several, the one inside the op's module."""
        graph = self.split.graph
        tied = next((p for p in graph.parameters if p.name == name), None)
        names = (name, *tied.aliases) if tied is not None else (name,)
        near = "" if op is None or op.call == LOSS else graph.calls[op.call].path
        usable = [n for n in names if self.holds(n)]
        return next((n for n in usable if near and n.startswith(f"{near}.")), (*usable, name)[0])

    def training(self, op: Op) -> SourceForm:
        """Return the expression for an op's training mode in this module's code."""
        is_always = kind_of(op) is OpKind.BATCH_NORM and op.argument("running_mean") is None
        if op.call == LOSS or is_always:
            return text("True")
        path, modules = self.split.graph.calls[op.call].path, self.split.modules
        is_alike = path not in modules or modules[path].trains == modules[self.root].trains
        return text("self.training") if is_alike else text(f"self{self.steps(path)}.training")

    def rate(self, op: Op) -> SourceForm | None:
        """Return the module's attribute for an op's dropout rate, if it has one."""
        rate = next(
            (v for v in (argument(op, "p"), argument(op, "dropout_p")) if v is not None), None
        )
        own = self.path_of(op.call)
        if own is not None and self.split.modules[own].settings.get("p") == rate is not None:
            return text(f"self{self.steps(own)}.p")
        return self.setting(op.call, op.spans, rate)

    def scale(self, op: Op) -> SourceForm | None:
        """Return the module's attribute for the scale of attention, if it has one."""
        return self.setting(op.call, op.spans, argument(op, "scale"))

    def setting(self, call: str, spans: Sequence[SourceSpan], value: Value) -> SourceForm | None:
        """Return the module's attribute that the source has for a number (`self.eps`), if any."""
        path = self.path_of(caller(call, spans, self.split.graph))
        if path is None or type(value) not in (int, float):
            return None
        settings = self.split.modules[path].settings
        for name in (name for span in spans for names in attributes_given(span) for name in names):
            if name in settings and (type(settings[name]), settings[name]) == (type(value), value):
                return text(f"self{self.steps(path)}.{name}")
        return None

    def number(self, op: Op, tree: ast.expr) -> Computed | None:
        """Return a number that the source reads from `self`, as the printed code reads it."""
        path = self.path_of(caller(op.call, op.spans, self.split.graph))
        name = ast.unparse(tree)
        settings = {} if path is None else self.split.modules[path].settings
        if path is None or not name.startswith("self.") or name[5:] not in settings:
            return None
        return settings[name[5:]], text(f"self{self.steps(path)}.{name[5:]}")

    def path_of(self, call: str) -> str | None:
        """Return the path of the module that a call runs, or None if the call runs no module."""
        record = self.split.graph.calls.get(call)
        return record.path if record is not None and record.path in self.split.modules else None

    def parameter_fact(self, what: str, ops: Iterable[Op]) -> SourceForm | None:
        """Return the expression of the dtype or device of one of this module's parameters.

        A parameter that `ops` read comes first, because a stage may lack the others.
        """
        read = {name for op in ops for name in op.inputs}
        parameters = self.split.graph.parameters
        for parameter in sorted(parameters, key=lambda one: one.name not in read):
            for name in (parameter.name, *parameter.aliases):
                owner, _, leaf = name.rpartition(".")
                if self.holds(name) and is_identifier(leaf):
                    return text(f"self{self.steps(owner)}.{leaf}.{what}")
        return None


class AvailableValues:
    """The values that a call's printed code has so far, and access to its module's tensors."""

    def __init__(
        self,
        opening: Opening,
        scope: str,
        *,
        axis: str = "self.tensor",
        ops: Sequence[Op] | None = None,  # the call's ops that this code runs, if not all
    ) -> None:
        self.opening, self.scope = opening, scope
        self.ops = opening.tree.ops.get(scope, ()) if ops is None else ops
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.owner = Owner(self.split, "" if scope == LOSS else self.graph.calls[scope].path)
        self.axis = text(axis)
        self.sizes = ReadableSizes(self.split, self.axis)
        self.have: dict[str, Layout] = {}  # available tensor → the layout that it had first
        # result of an op that does nothing, or repeats another op → the equal value
        self.same: dict[LocalTensor, LocalTensor] = {}
        self.defined: set[LocalTensor] = set()
        self.arguments: dict[LocalTensor, str] = {}
        self.lines: list[Line] = []
        self.unpacked: set[str] = set()  # arguments that are containers
        # tuple of a container's contents → the container's name
        self.containers: dict[Expression, str] = {}
        self.late_biases: dict[str, str] = {}  # a linear's partial sums → the bias added later
        own = self.tree.ops.get(scope, ())
        self.written = set[str]().union(*map(self.graph.index.written_by, own))

    # --- incoming values -------------------------------------------------------------------------

    def bind(self, local: LocalTensor, name: str) -> None:
        """Bind an incoming value to a name."""
        if local.tensor not in self.have:
            self.arguments[local] = name
            self.define(local)
            self.sizes.add_argument(local)

    def copy(self, local: LocalTensor) -> None:
        """Copy an argument before it is written to."""
        why = "copied, because autograd forbids writing to a leaf"
        copied = method(local, "clone")
        self.lines.append(Line(results=local, expression=copied, is_ordered=True, reason=why))

    def bind_pattern(self, pattern: Pattern, source: str, names: tuple[str, ...] = ()) -> None:
        """Unpack an incoming container into its values; `names` are the author's names for them."""
        new = [local for local in values_in(pattern) if local.tensor not in self.have]
        if new:
            self.unpacked.add(source.partition("[")[0])
            given = tuple((name,) if name else () for name in names)
            self.lines.append(Line(results=pattern, expression=text(source), names=given))
            for local in new:
                self.define(local)
            if isinstance(pattern, tuple) and all(
                isinstance(item, LocalTensor) for item in pattern
            ):
                self.containers[joined(tuple(values_in(pattern)))] = source

    # --- results of lines ------------------------------------------------------------------------

    def add_line(self, line: Line) -> None:
        """Add a line, and make its results available."""
        made = tuple(values_in(line.results))
        names = tuple(self.tree.names_in(self.scope, local.tensor) for local in made)
        self.lines.append(replace(line, names=line.names or names))
        for local in made:
            self.define(local)

    def define(self, local: LocalTensor) -> None:
        """Make a value available from here on."""
        self.have.setdefault(local.tensor, local.layout)
        self.defined.add(local)
        self.sizes.add(local)

    def rename(self, made: LocalTensor, source: LocalTensor) -> None:
        """Make a value an alias of another one."""
        self.same[made] = source
        self.have.setdefault(made.tensor, made.layout)

    # --- reads of lines --------------------------------------------------------------------------

    def value(self, tensor: str, need: Layout, op: Op | None = None) -> Expression:
        """Return a tensor in the needed layout, converted first if necessary."""
        known = self.graph.tensors[tensor]
        if known.origin not in (TensorOrigin.OP, TensorOrigin.INPUT) and tensor not in self.have:
            return conversions.convert_own(self.owned(tensor, op), tensor, need, self.sizes)
        if tensor not in self.have:
            raise PrintAgainError.for_tensor(tensor, self.scope, self.opening)
        local = LocalTensor(tensor, self.have[tensor])
        crossing = self.split.crossing.get(tensor)
        layers = self.split.layer_of
        is_used_outside = op is None or layers.get(tensor) != layers[op.name]
        if crossing not in (None, local.layout, need) and is_used_outside:
            assert crossing is not None
            return self._converted(LocalTensor(tensor, crossing), LocalTensor(tensor, need), op)
        return self._converted(local, LocalTensor(tensor, need), op)

    def _converted(self, local: LocalTensor, wanted: LocalTensor, op: Op | None) -> Expression:
        if local.layout == wanted.layout:
            return self.same.get(local, local)
        if local.layout != self.have[local.tensor]:
            self.value(local.tensor, local.layout, op)
        if wanted not in self.defined:
            self.add_line(self._conversion(local, wanted))
            self.sizes.add_converted(wanted)
        return wanted

    def _conversion(self, local: LocalTensor, wanted: LocalTensor) -> Line:
        users = [o for o in self.graph.index.readers[local.tensor] if self._converts_for(o, wanted)]
        source = self.same.get(local, local)
        made = conversions.convert(source, wanted, local, self.sizes)
        why = conversions.explained(conversions.reason(local, wanted, users, self.split), made)
        converted: Expression = made
        if local.tensor in self.late_biases:
            maker = self.graph.index.made_by[local.tensor]
            bias = self.owned(self.late_biases[local.tensor], maker)
            converted = binary(converted, "+", bias, Binding.SUM)
        # a later op writes to this value, and other ops may still read the source
        if self.graph.index.is_written_later(wanted.tensor):
            converted = method(converted, "clone")
        return Line(results=wanted, expression=converted, reason=why)

    def _converts_for(self, op: Op, wanted: LocalTensor) -> bool:
        return any(
            name == wanted.tensor and wanted.layout in self.split.layouts_of(op, i)[1:]
            for i, name in enumerate(op.inputs)
        )

    def owned(self, tensor: str, op: Op | None) -> Expression:
        """Return the expression of a parameter, buffer or constant."""
        constant = self.graph.constants.get(tensor)
        is_constant = self.graph.tensors[tensor].origin is TensorOrigin.CONSTANT
        if is_constant and constant is not None and constant.values is not None:
            return self._numbers(tensor)
        own = self.owner.tensor(tensor, op)
        if own is None:
            raise PrintAgainError.for_tensor(tensor, self.scope, self.opening)
        return own

    def _numbers(self, constant: str) -> SourceForm:
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
        """Return the model's own floating dtype, read from an available value or a parameter."""
        for local in self.values():
            if self.graph.tensors[local.tensor].dtype == "model":
                return Fact(local, "dtype")
        return self.owner.parameter_fact("dtype", self.ops)

    def device(self) -> Expression | None:
        """Return the device, read from an available value, or else from a parameter."""
        local = next(self.values(), None)
        if local is not None:
            return Fact(local, "device")
        return self.owner.parameter_fact("device", self.ops)

    def values(self) -> Iterator[LocalTensor]:
        """Yield the available values, arguments first."""
        arguments = [local for local in self.sizes.seen if local in self.arguments]
        yield from (*arguments, *(h for h in self.sizes.seen if h not in self.arguments))

    def plain_size(self, value: Value, other: Value = None) -> Expression:
        """Print a size or another plain argument.

        `other` is its value in a trace on rows of other lengths: if that differs, it is a length.
        """
        if isinstance(value, Extent) or (type(value) is int and other not in (None, value)):
            more = value if other is None else other
            assert isinstance(more, (int, Extent))
            return self.sizes.whole(size(value), size(more))
        assert value is None or isinstance(value, (bool, int, float, complex, str))
        return literal(value)

    def reads_written(self, op: Op) -> bool:
        """Whether an op uses memory that this body writes to."""
        return not self.written.isdisjoint(self.graph.index.storages((*op.inputs, *op.outputs)))
